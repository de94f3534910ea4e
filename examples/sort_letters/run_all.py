"""Every algorithm on the example, one run after another: `python examples/sort_letters/run_all.py [NAME ...] [--seeds 0 1]`.

Each run file states its bar at the top. The outcome of each run (rewards by step, CPU seconds, whether the bar is reached) is put
into `docs/curves.json` as soon as the run has ended, and what is there already is not run again; docs/curves.py draws it.
On-policy distillation takes the model that the GRPO run of the same seed ended in as its teacher, so that one comes first. Takes
about a minute a run on two quiet cores. Exit code 1 if a run fails or misses its bar.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAMES = ("grpo", "gspo", "sapo", "cispo", "rloo", "reinforce_pp", "ppo", "opd")
LAST = 5
DEADLINE_S = 1200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help=f"of {', '.join(NAMES)}; all of them by default")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/curves.json")
    parser.add_argument("--set", action="append", default=[], help="passed on to every run")
    options = parser.parse_args()
    known: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for seed in options.seeds:
        for name in options.names:
            key = f"{name}/{seed}"
            if key in known:
                continue
            known[key] = run(name, seed, options.set)
            lines = (f"{json.dumps(one)}: {json.dumps(known[one])}" for one in sorted(known))  # a line a run
            options.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            print(json.dumps({"run": key} | {k: v for k, v in known[key].items() if k != "rewards"}), flush=True)
    asked = [known[f"{name}/{seed}"] for seed in options.seeds for name in options.names]
    return 0 if all(one["reached"] for one in asked) else 1


def run(name: str, seed: int, sets: list[str]) -> dict[str, Any]:
    """One run, in `runs/` of the present folder."""
    file, run_name = HERE / f"{name}.yaml", f"sort-letters-{name}-{seed}"
    chosen = [f"run={run_name}", f"seed={seed}", *sets]
    if name == "opd":
        chosen.append(f"teacher.path={Path.cwd() / 'runs' / f'sort-letters-grpo-{seed}' / 'model'}")
    command = [sys.executable, "-m", "services.controller.cli", "up", str(file)]
    command += [part for value in chosen for part in ("--set", value)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(
            f"{name}, seed {seed}: exit code {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-1000:]}"
        )
    report = json.loads((Path("runs") / run_name / "report.json").read_text())
    rewards = report["reward_by_step"]
    last = sum(rewards[-LAST:]) / LAST
    bar = bar_of(file.read_text())
    return {
        "bar": bar,
        "last": round(last, 4),
        "reached": last >= bar,
        "first": round(sum(rewards[:LAST]) / LAST, 4),
        "held_out": report["evaluation"]["after"],
        "staleness_max": report["staleness_max"],
        "cpu_seconds": report["cpu_seconds"],
        "wall_seconds": report["wall_seconds"],
        "rewards": rewards,
    }


def bar_of(text: str) -> float:
    """What the run file says at its top."""
    found = re.search(r"^# Bar, set beforehand: .* at least ([\d.]*\d)", text, re.MULTILINE)
    assert found is not None, "a run file of this folder states its bar"
    return float(found[1])


if __name__ == "__main__":
    sys.exit(main())
