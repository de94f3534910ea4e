"""Steps per hour of the same job at `max_staleness` 0 and 1: what asynchrony is worth where drawing and training take as long.

    python -m benchmarks.async_vs_sync [--rounds 2] [--steps 14] [--case fixed|heavy]

Each run is `slipstream up` with real processes, one rollout replica, the engine's process pinned to one core and the trainer's to
another; the other services and the broker share the two. `fixed`: all answers have the same length, and the sizes are such that
drawing the groups of a step (G) takes about as long as training on them (T). `heavy`: lengths have a heavy tail, half of them
below 30 tokens, the longest 640. In both settings the trainer accumulates gradients as groups arrive, so the synchronous runs
overlap what they can. The settings alternate within a round, so that other load on the machine meets both.

`ratio_async_vs_sync` and `ratio_heavy_tail` are steps per hour of asynchronous over synchronous runs, counted from the `trained`
receipts after the first two steps. `limit` is (G + T) / max(G, T) of the synchronous runs, at most 2. That the reward is not
lower is checked on the reward by the *policy's* step (which weights drew it); `ratio_time_to_reward` is the ratio of the times
to reach the reward that both reach. Idle shares are the trainer's, by what it waited for. Aim: at least 1.6 for fixed lengths.

Other load on the machine makes the ratio smaller (where two busy cores are needed at once there is less to be had), and load that
comes and goes between runs makes it arbitrary. `ratio_of_busy_shares`, how much more of its time the trainer works, compares what
was measured inside each run: for equal work it is the same ratio. Trust figures where the two agree.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from services.controller.attach import Run, attach
from shared import wire
from shared.broker import EmbeddedBroker
from shared.records import Group, Metric, Receipt

RUN_FILE = Path(__file__).with_name("async_vs_sync.yaml")
SETTINGS = {"sync": 0, "async": 1}
SKIPPED = 2
"""Steps before the steady part."""
AIM = 1.6
TOLERANCE = 0.03
"""A reward of the asynchronous run that is lower by less counts as equal; a higher one is no objection."""
DEADLINE_S = 600.0
PIN_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """A job: what is set in the run file for it."""

    name: str
    sets: tuple[str, ...]


HEAVY_TAIL = (
    "model.build=async_task.build_heavy",
    "sampling.max_new_tokens=640",
    "groups_per_step=24",
    "samples_per_group=6",
    "trainer.optimizer.lr=1.0e-6",
)
"""The policy is all but held: at 1e-3 it would learn when to stop, and lengths would change in other ways in each run."""
CASES = (Case("fixed", ()), Case("heavy", HEAVY_TAIL))


@dataclass(slots=True)
class Measured:
    """The steady part of one run, or of several together."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    trainer: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by state: busy, groups, weights, ..., other."""
    drawing: float = 0.0
    """Seconds in which the engine worked on at least one group."""
    rewards: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By the step of the weights that drew them."""

    def add(self, other: Measured) -> None:
        self.steps += other.steps
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.drawing += other.drawing
        for state, seconds in other.trainer.items():
            self.trainer[state] += seconds
        for step, values in other.rewards.items():
            self.rewards[step] += values

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps

    def shares(self) -> dict[str, float]:
        return {state: round(seconds / self.seconds, 3) for state, seconds in sorted(self.trainer.items())}

    def curve(self) -> list[float]:
        """Mean reward of the policy after 0, 1, 2, ... updates, each with its neighbours."""
        means = [fmean(self.rewards[step]) for step in sorted(self.rewards)]
        return [fmean(means[max(0, at - 1) : at + 2]) for at in range(len(means))]


def run(case: Case, setting: str, number: int, url: str, folder: Path, steps: int) -> str:
    """One run to its end, pinned. Returns its name."""
    name = f"{case.name}-{setting}-{number}"
    sets = (
        *case.sets,
        f"run={name}",
        f"steps={steps}",
        f"max_staleness={SETTINGS[setting]}",
        f"model.path={folder / case.name}",
    )
    command = [sys.executable, "-m", "services.controller.cli", "up", str(RUN_FILE), "--nats", url]
    output = folder / f"{name}.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*command, *(part for one in sets for part in ("--set", one))],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(RUN_FILE.parents[1]), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + DEADLINE_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            pin(process.pid)
            time.sleep(PIN_EVERY_S)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}:\n{output.read_text()[-3000:]}")
    return name


def pin(parent: int) -> None:
    """Every thread of the engine to the first core, every one of the trainer to the second."""
    cores = dict(zip(("services.rollout.engines.light", "trainer"), sorted(os.sched_getaffinity(0)), strict=False))
    try:
        for child in psutil.Process(parent).children(recursive=True):
            line = child.cmdline()
            for core in [core for word, core in cores.items() if word in line]:
                for thread in child.threads():
                    os.sched_setaffinity(thread.id, {core})
    except (psutil.Error, ProcessLookupError):  # a process or thread that has just ended
        return


async def measure(url: str, name: str) -> Measured:
    """The steady part of a finished run, from its own records."""
    async with attach(url, name) as attached:
        receipts = [wire.decode(data, Receipt) async for data, _ in attached.queue.read("receipts")]
        metrics = [wire.decode(data, Metric) async for data, _ in attached.queue.read("metrics")]
        drawn = await drawing_times(attached)
    trained = [receipt for receipt in receipts if receipt.kind == "trained"]
    done = {step: max(r.at for r in trained if r.step == step) for step in {r.step for r in trained}}
    began, ended = done[SKIPPED - 1], done[max(done)]
    found = Measured(steps=max(done) - SKIPPED + 1, seconds=ended - began, drawing=covered(drawn, began, ended))
    found.trainer.update(trainer_seconds(metrics, SKIPPED, max(done) + 1))
    found.trainer["other"] = found.seconds - sum(found.trainer.values())
    found.tokens = sum(receipt.tokens for receipt in trained if receipt.step >= SKIPPED)
    for receipt in trained:
        if receipt.reward is not None and receipt.sample_steps is not None:
            found.rewards[int(receipt.sample_steps.min())].append(receipt.reward)
    return found


async def drawing_times(attached: Run) -> list[tuple[float, float]]:
    groups = [wire.decode(data, Group) async for data, _ in attached.queue.read("trajectories")]
    return [(group.times["started"], group.times["sampled"]) for group in groups]


def covered(spans: Iterable[tuple[float, float]], began: float, ended: float) -> float:
    """Seconds between `began` and `ended` that lie in at least one span."""
    total, reached = 0.0, began
    for start, end in sorted(spans):
        start, end = max(start, reached), min(end, ended)
        if end > start:
            total, reached = total + end - start, end
    return total


def trainer_seconds(metrics: list[Metric], first: int, last: int) -> dict[str, float]:
    """What the trainer's clocks counted between two steps."""
    at = {m.step: m.values for m in metrics if m.service == "trainer" and "step_s" in m.values and m.step}
    clocks = [name for name in at[last] if name == "busy_s" or name.startswith("wait_s.")]
    return {
        name.removesuffix("_s").removeprefix("wait_s."): at[last][name] - at[first].get(name, 0.0) for name in clocks
    }


def time_to(reward: float, found: Measured) -> float:
    """Seconds until the policy's smoothed reward gets there first, in steady steps."""
    curve = found.curve()
    for step, (before, after) in enumerate(pairwise(curve)):
        if after >= reward > before:
            return (step + (reward - before) / (after - before)) * found.step_s
    return (len(curve) - 1) * found.step_s


def compare(case: Case, sync: Measured, later: Measured) -> dict[str, Any]:
    """The figures of a case, and a few lines for people."""
    ratio = sync.step_s / later.step_s
    drawing, training = sync.drawing / sync.steps, sync.trainer["busy"] / sync.steps
    common = min(max(sync.rewards), max(later.rewards))
    ends = {name: found.curve()[common] for name, found in (("sync", sync), ("async", later))}
    reached = min(ends.values())
    result: dict[str, Any] = {
        "ratio": round(ratio, 3),
        "ratio_of_busy_shares": round(later.shares()["busy"] / sync.shares()["busy"], 3),
        "limit": round((drawing + training) / max(drawing, training), 3),
        "ratio_time_to_reward": round(time_to(reached, sync) / time_to(reached, later), 3),
        "drawing_s": round(drawing, 3),
        "training_s": round(training, 3),
    }
    for name, found in (("sync", sync), ("async", later)):
        shares = found.shares()
        idle = {state: share for state, share in shares.items() if state != "busy"}
        result[name] = {
            "steps_per_hour": round(3600 / found.step_s),
            "trainer_busy_share": shares["busy"],
            "trainer_idle_share": idle,
            "engine_busy_share": round(found.drawing / found.seconds, 3),
            "tokens_per_step": round(found.tokens / found.steps),
            "reward_first": round(found.curve()[0], 3),
            "reward_last": round(ends[name], 3),
        }
        waits = ", ".join(f"{state} {share:.0%}" for state, share in idle.items() if share >= 0.005)
        print(
            f"{case.name:5s} {name:5s}: {3600 / found.step_s:5.0f} steps/h ({found.step_s:.2f} s a step); trainer busy "
            f"{shares['busy']:.0%}, idle: {waits}; engine busy {found.drawing / found.seconds:.0%}; reward "
            f"{found.curve()[0]:.3f} -> {ends[name]:.3f}"
        )
    print(
        f"{case.name:5s} ratio {ratio:.2f} of at most {result['limit']:.2f}, by busy shares "
        f"{result['ratio_of_busy_shares']:.2f}; G {drawing:.2f} s, T {training:.2f} s"
    )
    return result


def measure_all(cases: list[Case], rounds: int, steps: int, folder: Path) -> dict[str, dict[str, Any]]:
    found = {case.name: {setting: Measured() for setting in SETTINGS} for case in cases}
    with EmbeddedBroker(folder / "broker") as broker:
        for number in range(rounds):
            for case in cases:
                for setting in SETTINGS:
                    name = run(case, setting, number, broker.url, folder, steps)
                    measured = asyncio.run(measure(broker.url, name))
                    print(f"{name}: {measured.step_s:.2f} s a step", flush=True)
                    found[case.name][setting].add(measured)
    return {case.name: compare(case, found[case.name]["sync"], found[case.name]["async"]) for case in cases}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--case", choices=[case.name for case in CASES], help="only this one")
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("this benchmark needs two cores: one for the engine and one for the trainer")
    cases = [case for case in CASES if arguments.case in (None, case.name)]
    load, started = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results = measure_all(cases, arguments.rounds, arguments.steps, Path(folder))
    keys = {"fixed": "ratio_async_vs_sync", "heavy": "ratio_heavy_tail"}
    equal = all(
        result["async"]["reward_last"] > result["sync"]["reward_last"] - TOLERANCE for result in results.values()
    )
    ratios = {keys[name]: result["ratio"] for name, result in results.items()}
    reached = equal and ratios.get("ratio_async_vs_sync", AIM) >= AIM
    print(f"aim: at least {AIM} at equal reward: {'reached' if reached else 'MISSED'}")
    about = {"rounds": arguments.rounds, "steps": arguments.steps, "load_at_start": round(load, 1)}
    about["seconds"] = round(time.monotonic() - started)
    print(json.dumps({"benchmark": "async_vs_sync", **ratios, "equal_reward": equal, **about, "cases": results}))
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
