"""The example with a trainer of two ranks: tensor-parallel and pipelined, started by the trainer itself, and data-parallel under
torchrun.

All finish, and their books balance; a rank that is killed ends the trainer, and the next one goes on from the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.dcs import snapshots
from services.trainer.checkpoint import CheckpointStore
from tests.e2e.test_run import DEADLINE_S, EXAMPLE, GROUPS, Example, heartbeat, until_trained
from tests.processes import children, ended
from tests.shared.runs import until

STEPS = 8
RANKS = ["trainer.ranks=2", "trainer.rank_timeout_s=60", "trainer.warm_start.steps=40", f"steps={STEPS}"]


@pytest.fixture
async def example(tmp_path: Path) -> AsyncIterator[Example]:
    example = Example(tmp_path)
    yield example
    await example.close()


def balanced(report: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["balanced"], found
    assert found["faults"] == []
    assert found["trained"] == STEPS * GROUPS
    return found


async def test_two_tensor_parallel_ranks_and_one_of_them_killed(example: Example) -> None:
    megatron = "trainer.megatron={tensor_model_parallel_size: 2, sequence_parallel: true}"
    up = await example.up(*RANKS, megatron, "trainer.checkpoint.every=2")
    async with example.attached() as run:
        await until_trained(run, 3 * GROUPS)
        await until(lambda: CheckpointStore(example.workdir / "checkpoints").entries()[1:], "a checkpoint", DEADLINE_S)
        beat = await heartbeat(run, "trainer-0")
        assert beat is not None
        (other,) = children(beat.pid)
        other.kill()
        assert await example.ends(up) == 0, example.text
    balanced(example.report)
    log = (example.workdir / "logs/trainer-0.log").read_text()
    assert "lost another rank: rank 1 ended with exit code -9" in log
    await until(lambda: ended(other.pid), "the killed rank is gone", DEADLINE_S)


async def test_two_pipeline_stages_send_their_weights_each_by_itself(example: Example) -> None:
    up = await example.up(*RANKS, "trainer.megatron={pipeline_model_parallel_size: 2}", "trainer.checkpoint.every=4")
    async with example.attached() as run:
        await until_trained(run, 2 * GROUPS)
        beat = await heartbeat(run, "trainer-0")
        assert beat is not None
        (other,) = children(beat.pid)
        other.kill()
        assert await example.ends(up) == 0, example.text
    found = balanced(example.report)
    await until(lambda: ended(other.pid), "the killed rank is gone", DEADLINE_S)
    newest = found["versions"][-1]["version"]
    manifest = snapshots.read(example.workdir / "snapshots", newest)
    assert manifest is not None
    assert sorted(set(manifest.sent_by)) == [0, 1], "a sender a stage"
    ways = {holder["how"] for version in found["versions"] for holder in version["holders"].values()}
    assert "broadcast" in ways


async def test_two_replicas_with_the_distributed_optimiser_under_torchrun(example: Example) -> None:
    sets = [*RANKS, "trainer.megatron.use_distributed_optimizer=true", f"model.path={example.folder}/model"]
    up = await example.starts("tests.e2e.up_with_ranks", str(EXAMPLE), "torchrun", "2", str(example.report), *sets)
    assert await example.ends(up) == 0, example.text
    balanced(example.report)
    assert "trainer rank 1" not in (example.workdir / "logs/trainer-0.log").read_text(), (
        "the other rank had nothing to say"
    )
