"""The demo job on TRL's GRPOTrainer and on Slipstream: samples a CPU second, and CPU seconds until the reward is 0.8.

    python -m benchmarks.vs_trl [--steps 100] [--seeds 0 1] [--trl-python PYTHON]

Both start from the same supervised weights and train the same model on the same task with the same batch (16 prompts x 8
samples, one update each), learning rate, clip and Adam. Slipstream runs `slipstream up` on examples/sort_letters/grpo.yaml with
all its services, and *everything* counts: trainer, engine, rollout, reward, DCS, controller, broker and `up` itself, from the
first update to the last. TRL is one process and is counted from its first batch on, without imports. The runs alternate.

`ratio_samples_per_cpu_s` is Slipstream over TRL, the median over seeds; above 1 is good for Slipstream. Aim: 2. `share` says
where Slipstream's CPU seconds went. TRL 1.16.0 is installed into an environment of its own (`--trl-python` names one that is
there), which takes torch and transformers from this one. The last line is JSON.

What bounds it: an update of 128 samples of this tiny model is 93 ms of CPU on TRL. Of Slipstream's 240 ms, forward and backward
are about 40 and drawing the samples is 34, so that even services that cost nothing would give 1.25; the rest is paid by message
(16 groups an update, each stored four times and acknowledged as often, two receipts) and by version (copied, hashed, written and
broadcast). What a message costs does not grow with the model; here the model is next to nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from services.controller.launchers.model import ensure_model
from services.trainer.megatron.policy import Policy
from services.trainer.ranks import RankedPolicy
from services.trainer.start import demonstrations
from services.trainer.warm_start import run_warm_start
from shared import config as run_config

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples/sort_letters"
RUN_FILE = EXAMPLE / "grpo.yaml"
TRL = ("trl==1.16.0", "accelerate", "datasets")
TORCH = "torch==2.13.0"
AIM = 2.0
REWARD = 0.8
SMOOTH = 5
DEADLINE_S = 1800.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL, torch and transformers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vs-trl-") as name:
        folder = Path(name)
        python = options.trl_python or trl_environment(folder / "env")
        runs: dict[str, list[dict[str, Any]]] = {"slipstream": [], "trl": []}
        for seed in options.seeds:
            model = warm_model(folder / f"model-{seed}", seed)
            for kind, go in (("trl", run_trl), ("slipstream", run_slipstream)):
                found = go(folder, model, seed, options.steps, python)
                runs[kind].append(found)
                told = {key: value for key, value in found.items() if key not in ("rewards", "cpu_at")}
                print(json.dumps({"system": kind, "seed": seed} | told), flush=True)
    ours, theirs = (median(run["samples_per_cpu_s"] for run in runs[kind]) for kind in ("slipstream", "trl"))
    print(
        json.dumps(
            {
                "benchmark": "vs_trl",
                "baseline": TRL[0],
                "ratio_samples_per_cpu_s": round(ours / theirs, 3),
                "aim": AIM,
                "samples_per_cpu_s": {"slipstream": round(ours, 1), "trl": round(theirs, 1)},
                "cpu_s_to_reward_0.8": {
                    kind: [run["cpu_s_to_reward"] for run in found] for kind, found in runs.items()
                },
                "last_reward": {kind: [run["last_reward"] for run in found] for kind, found in runs.items()},
                "share": runs["slipstream"][-1]["share"],
                "steps": options.steps,
                "seeds": options.seeds,
                "load": [round(value, 1) for value in os.getloadavg()],
            }
        )
    )


def trl_environment(folder: Path) -> Path:
    """An environment with TRL that sees this one's packages, so that neither torch nor transformers is installed twice."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    inside = next(folder.glob("lib/python*/site-packages"))
    (inside / "parent.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    (folder / "constraints.txt").write_text(TORCH + "\n")
    python = folder / "bin/python"
    command = [str(python), "-m", "pip", "install", "--quiet", *TRL, "--constraint", str(folder / "constraints.txt")]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    return python


def warm_model(folder: Path, seed: int) -> Path:
    """The weights that both begin with: the example's supervised phase, by Slipstream's trainer."""
    import asyncio

    config = run_config.load(RUN_FILE, [f"seed={seed}", f"model.path={folder}-random"])
    asyncio.run(ensure_model(config))
    warm = config.trainer.warm_start
    assert warm is not None
    policy = RankedPolicy.alone(Policy.create(config.path(config.model.path), config.trainer, seed=seed))
    run_warm_start(policy, demonstrations(config, warm), warm, token_budget=config.trainer.micro_batch_tokens)
    policy.save_hf(folder)
    return folder


def run_trl(folder: Path, model: Path, seed: int, steps: int, python: Path) -> dict[str, Any]:
    config = run_config.load(RUN_FILE)
    sizes = [config.groups_per_step, config.samples_per_group]
    numbers = [str(value) for value in (seed, steps, *sizes, config.trainer.optimizer.lr)]
    done = subprocess.run(
        [str(python), str(ROOT / "benchmarks/trl_job.py"), str(model), *numbers],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    if done.returncode != 0:
        raise SystemExit(f"TRL failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return summary(found["cpu_s"], found["wall_s"], found["rewards"], found["cpu_at"], steps * sizes[0] * sizes[1])


def run_slipstream(folder: Path, model: Path, seed: int, steps: int, _python: Path) -> dict[str, Any]:
    """`slipstream up`, its whole tree of processes looked at whenever it tells of an update."""
    name = f"vs-trl-{seed}"
    sets = [f"run={name}", f"seed={seed}", f"steps={steps}", f"model.path={model}", "trainer.warm_start=null"]
    sets.append("eval.prompts=null")
    command = [sys.executable, "-m", "services.controller.cli", "up", str(RUN_FILE)]
    command += [part for value in sets for part in ("--set", value)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    marks: dict[int, tuple[float, dict[str, float]]] = {}
    lines = []
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as up:
        assert up.stdout is not None
        for line in up.stdout:
            lines.append(line)
            if (step := re.match(r"step +(\d+)/", line)) and int(step[1]) not in marks:
                marks[int(step[1])] = (time.perf_counter(), cpu_by_service(up.pid))
    if up.returncode != 0:
        raise SystemExit(f"slipstream up failed:\n{''.join(lines[-30:])}")
    report = json.loads((folder / "runs" / name / "report.json").read_text())
    first, last = min(marks), max(marks)
    spent = {service: seconds - marks[first][1].get(service, 0.0) for service, seconds in marks[last][1].items()}
    totals = {step: sum(found.values()) for step, (_, found) in marks.items()}
    updates = last - first
    samples = updates * report["samples"] // report["steps"]
    # What was spent before the first mark belongs to the start; an update's own share of it is put back.
    each = sum(spent.values()) / updates
    at = [totals.get(step, float("nan")) - totals[first] + first * each for step in range(1, last + 1)]
    found = summary(sum(spent.values()), marks[last][0] - marks[first][0], report["reward_by_step"], at, samples)
    total = sum(spent.values())
    return found | {"share": {name: round(seconds / total, 3) for name, seconds in sorted(spent.items())}}


def cpu_by_service(pid: int) -> dict[str, float]:
    """CPU seconds so far of a process and all below it, by what they are."""
    seconds: dict[str, float] = defaultdict(float)
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        try:
            times, words = process.cpu_times(), process.cmdline()
        except psutil.Error:
            continue  # it has just ended
        if process.pid == pid:
            name = "up"
        elif "serve" in words:
            name = words[words.index("serve") + 1]
        elif any("engines.light" in word for word in words):
            name = "engine"
        elif any("nats-server" in word for word in words):
            name = "broker"
        else:
            name = "reward"  # its scoring processes
        seconds[name] += times.user + times.system
    return dict(seconds)


def summary(cpu_s: float, wall_s: float, rewards: list[float], cpu_at: list[float], samples: int) -> dict[str, Any]:
    means = [sum(rewards[max(0, i - SMOOTH + 1) : i + 1]) / min(i + 1, SMOOTH) for i in range(len(rewards))]
    reached = next((i for i, mean in enumerate(means) if i + 1 >= SMOOTH and mean >= REWARD), None)
    known = reached is not None and reached < len(cpu_at) and cpu_at[reached] == cpu_at[reached]
    return {
        "samples_per_cpu_s": round(samples / cpu_s, 1),
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(wall_s, 2),
        "cpu_s_to_reward": round(cpu_at[reached], 2) if known and reached is not None else None,
        "updates_to_reward": None if reached is None else reached + 1,
        "last_reward": round(means[-1], 3),
        "rewards": rewards,
        "cpu_at": cpu_at,
    }


if __name__ == "__main__":
    main()
