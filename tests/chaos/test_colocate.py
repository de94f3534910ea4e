"""Trainer and engines on one device, killed at every point of the handshake: the run ends as an undisturbed one, bit for bit.

Real services, a real broker, Megatron and the light engine, as in test_determinism.py, with `placement: colocate`. That nobody
meets the other on the device is tests/shared/test_turns.py's and tests/dcs/test_colocate.py's.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from services.controller.attach import Run
from services.dcs import segments
from shared.failpoints import TURN_POINTS
from shared.turn_table import TurnTable
from tests.chaos.fork import Forks, call
from tests.chaos.test_determinism import DEADLINE_S, GROUPS, Outcome, run_once, until_step
from tests.processes import children
from tests.shared.runs import until

STEPS = 10
OF_THE_TRAINER = [
    "trainer.complete:2",
    "trainer.asked:3",
    "trainer.awake:2",
    "weights.announced:2",
    "trainer.asleep:2",
    "trainer.gave:2",
    "weights.snapshot:2",
]
OF_ROLLOUTS = {
    "rollout-0": ["rollout.entered:3", "rollout.idle:2", "rollout.asleep:2"],
    "rollout-1": ["rollout.entered", "rollout.slept:2", "rollout.took:2", "rollout.switched:2"],
}
OF_THE_DCS = ["dcs.decided:3", "dcs.announced:2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "warm"
    call("tests.chaos.test_determinism:make_model", str(folder))
    return folder


async def colocated(model: Path, folder: Path, **more: Any) -> Outcome:
    """No segment is left, and no token is older than the weights before its update."""
    outcome = await run_once(
        model, folder, ("rollout-0", "rollout-1"), placement="colocate", steps=STEPS, dcs={"bucket_mb": 1}, **more
    )
    prefix = segments.prefix("exact", str(folder / "work"))
    assert list(segments.FOLDER.glob(f"{prefix}*")) == []
    assert [f"{check.name}: {fault}" for check in outcome.audit.checks for fault in check.faults] == []
    assert set(outcome.audit.ages) == {0}
    assert outcome.audit.trained == STEPS * GROUPS
    assert sorted(outcome.digests) == list(range(STEPS + 1))
    return outcome


def test_every_point_of_the_handshake_is_tried() -> None:
    tried = {point.partition(":")[0] for names in [OF_THE_TRAINER, *OF_ROLLOUTS.values()] for point in names}
    assert tried >= set(TURN_POINTS)


def check(outcome: Outcome, quiet: Outcome, points: dict[str, list[str]]) -> None:
    assert sorted(outcome.fired) == sorted(point for names in points.values() for point in names)
    assert outcome.digests == quiet.digests
    assert outcome.audit.dropped == quiet.audit.dropped


@pytest.fixture(scope="module")
async def quiet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = await colocated(model, tmp_path_factory.mktemp("quiet"))
    assert outcome.rollbacks == 0
    assert len(set(outcome.digests.values())) == STEPS + 1, "every update changed the weights"
    return outcome


async def test_a_trainer_killed_at_every_point_of_its_turn(model: Path, quiet: Outcome, tmp_path: Path) -> None:
    points = {"trainer-0": OF_THE_TRAINER}
    check(await colocated(model, tmp_path, points=points), quiet, points)


async def test_everybody_else_killed_at_every_point(model: Path, quiet: Outcome, tmp_path: Path) -> None:
    """And an engine by itself, in the trainer's turn if there is one to come."""

    async def disturb(run: Run, forks: Forks) -> None:
        await until_step(run, 2)
        table = TurnTable(run.kv, asyncio.sleep)

        async def asked() -> bool:
            return (await table.read()).holder == "trainer" or not forks._living

        await until(asked, "the trainer's turn", DEADLINE_S)
        for engine in children(forks.pid("rollout-1")) if "rollout-1" in forks._living else ():
            with suppress(ProcessLookupError):
                os.kill(engine.pid, signal.SIGKILL)

    points = {**OF_ROLLOUTS, "dcs-0": OF_THE_DCS}
    check(await colocated(model, tmp_path, points=points, disturb=disturb), quiet, points)
