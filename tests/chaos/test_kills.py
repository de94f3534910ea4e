"""A run under SIGKILLs: a seeded schedule over all services, what they start, and the broker, while the example trains.

It must finish, its books must balance, no group may be lost or trained twice, and the reward must be no worse than without kills.
The run has no end of its own while it is harmed: however fast the machine, the schedule is played whole; then it is stopped, and
started again for its last steps.
`KILLS` and `SEED` in the environment make it longer or different (`make chaos KILLS=200 SEED=3`).
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from services.controller.attach import Run
from shared import wire
from shared.ledger import Ledger
from shared.records import Receipt
from tests.chaos.schedule import PARTS, strikes
from tests.chaos.system import System
from tests.shared.runs import until

KILLS = int(os.environ.get("KILLS", "20"))
SEED = int(os.environ.get("SEED", "0"))
GROUPS = 16
STEPS = 20 + 3 * KILLS
"""Of the run that nobody harms, and at least of the other one."""
FOR_EVER, LAST = "steps=20000", 3  # the ledger of a million would not fit into the broker
DEADLINE_S = 600.0 + 40.0 * KILLS
PATIENCE_S = 600.0
"""How long a run may take to train one more group, whatever was done to it."""
WINDOW, TOLERANCE = 20, 0.2
"""Of the mean reward of so many last steps, between runs of different samples. It begins at 0.27 and comes to 0.8 and more; means
of five steps of undisturbed runs were 0.78 and 0.87."""


@pytest.fixture(scope="module")
def settings() -> list[str]:
    return [
        f"steps={STEPS}",
        "eval.prompts=null",
        "trainer.checkpoint.every=5",
        f"seed={SEED}",
        "trainer.optimizer.schedule=constant",  # the same for any number of steps
    ]


async def test_schedules_are_reproducible_and_hit_everything():
    once, again = list(strikes(7, 40)), list(strikes(7, 40))
    assert once == again != list(strikes(8, 40))
    assert set(Counter(strike.part for strike in once).values()) <= {4, 5}


async def test_a_run_under_kills_ends_as_one_without(tmp_path: Path, settings: list[str], capsys):
    async with System(tmp_path / "calm", *settings, f"model.path={tmp_path}/model") as calm:
        warm = await calm.first_weights(tmp_path / "warm")
        undisturbed = await calm.ends(DEADLINE_S)
    start = (f"model.path={warm}", "model.build=null", "trainer.warm_start=null")
    async with System(tmp_path / "chaos", *settings, *start, FOR_EVER) as system:
        struck = await harm(system)
        steps = (await system.stops())["steps"] + LAST
        system.sets.append(f"steps={steps}")
        await system.start()
        report = await system.ends(DEADLINE_S)
        story = await system.events()
    with capsys.disabled():
        print(f"\n{summary(struck, report, undisturbed, story)}")
    assert sum(struck.values()) == KILLS, f"the run ended by itself: {struck}"
    if len(PARTS) <= KILLS:
        assert set(struck) == set(PARTS)
    assert report["balanced"], report["faults"]
    assert report["faults"] == []
    assert report["trained"] == steps * GROUPS >= STEPS * GROUPS
    assert report["pending"] == 0, "a group was lost"
    assert set(report["dropped"]) <= {"stale"}, "a kill made a group unusable"
    assert report["staleness_max"] <= report["staleness_bound"]
    assert learnt(report) > learnt(undisturbed) - TOLERANCE
    assert_told(struck, story)


def learnt(report: dict[str, Any]) -> float:
    return fmean(report["reward_by_step"][-WINDOW:])


async def harm(system: System) -> Counter[str]:
    """Play the schedule. How often each part was killed."""
    struck: Counter[str] = Counter()
    async with system.attached() as run:
        progress = Progress()
        following = asyncio.create_task(progress.follow(run))
        for strike in strikes(SEED, KILLS):
            if not strike.hasty:
                await progress.moves(PATIENCE_S)
            await asyncio.sleep(strike.after_s)
            if await system.kill(strike.part) is None:
                break
            struck[strike.part] += 1
        await until(lambda: all(map(system.pid, PARTS)), "all are there again", PATIENCE_S)
        while system.running and progress.ledger.trained < STEPS * GROUPS:
            await progress.moves(PATIENCE_S)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    return struck


class Progress:
    """How many groups are trained, as the receipts come."""

    def __init__(self) -> None:
        self.ledger, self.changed = Ledger(), asyncio.Condition()

    async def follow(self, run: Run) -> None:
        async for message, _ in run.queue.read("receipts", live=True):
            async with self.changed:
                self.ledger.apply(wire.decode(message, Receipt))
                self.changed.notify_all()

    async def moves(self, deadline_s: float) -> None:
        """Until another group is trained."""
        before = self.ledger.trained
        async with asyncio.timeout(deadline_s), self.changed:
            await self.changed.wait_for(lambda: self.ledger.trained > before)


def assert_told(struck: Counter[str], story: list[dict[str, Any]]) -> None:
    """Every death is on record with its cause and times, and so is every way back."""
    by_up = [event for event in story if event["detail"].get("by") == "up"]
    kinds = Counter((event["replica"], event["kind"]) for event in by_up)
    for part, times in struck.items():
        if part == "broker":
            assert kinds["up", "broker"] >= times
        elif part.endswith(("-0", "-1")):
            assert kinds[part, "exit"] >= times
            assert kinds[part, "restart"] == kinds[part, "exit"]
    assert all(event["detail"]["cause"] for event in by_up if event["kind"] in ("exit", "restart", "broker"))


def summary(struck: Counter[str], report: dict[str, Any], calm: dict[str, Any], story: list[dict[str, Any]]) -> str:
    """The figures of a run, for people."""
    back: dict[str, list[float]] = {}
    for event in story:
        if event["kind"] in ("back", "broker") and event["detail"].get("by") == "up":
            back.setdefault(event["replica"].replace("up", "broker"), []).append(event["detail"]["down_s"])
    rows = [f"{part}: killed {times}" for part, times in sorted(struck.items())]
    rows += [
        f"{part}: back after {min(times):.1f} to {max(times):.1f} s (median {median(times):.1f})"
        for part, times in sorted(back.items())
    ]
    numbers = ("steps", "issued", "trained", "dropped", "pending", "rollbacks", "reward_last", "wall_seconds")
    again = sum(event["detail"]["count"] for event in story if event["kind"] == "redelivered")
    rows.append(" ".join(f"{name}={report.get(name)}" for name in numbers) + f" redelivered={again}")
    rows.append(f"without kills: reward_last={calm['reward_last']} wall_seconds={calm['wall_seconds']}")
    return "\n".join(rows)
