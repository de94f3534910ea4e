"""Weights with several senders, one a pipeline stage of the trainer: one version, and one fate for all of it.

The stages' heads are processes of their own, without a model. With one: tests/trainer/layouts, tests/e2e/test_trainer_ranks.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from services.dcs import snapshots
from services.dcs.digest import ManifestError
from services.dcs.snapshots import Manifest, SnapshotError
from services.trainer.snapshot_files import plan
from services.trainer.stage import StageLost
from services.trainer.weight_copy import Copier, Outline, manifest_of
from services.trainer.weights import WeightPublisher
from tests.dcs.conftest import Replica, World, weights
from tests.dcs.stage_process import StageProcess
from tests.shared.runs import until

KIB = 1 << 10
ROWS = 100_000
"""Of a version in which each sender has several buckets of a megabyte."""
LONG_S, SHORT_S = 300.0, 10.0
"""dcs.timeout_s where the fault tells of itself, and where nothing else does."""
DEADLINE_S = 90.0
PARTS = (("embed",), ("layer.norm", "layer.proj"), ("scale",))
"""Whose tensors are whose: the leader's first."""


# -- how the parts are put together -----------------------------------------------------------------------------------


def outlines_of(sizes: list[list[int]]) -> list[Outline]:
    """A copy of each sender, with tensors of so many numbers."""
    return [
        Copier(KIB).copy((f"{sender}.{index}", torch.full((size,), 1.0)) for index, size in enumerate(mine)).outline
        for sender, mine in enumerate(sizes)
    ]


@given(st.lists(st.lists(st.integers(1, 600), min_size=1, max_size=8), min_size=1, max_size=4))
def test_every_tensor_is_sent_once_by_its_own_sender(sizes: list[list[int]]) -> None:
    outlines = outlines_of(sizes)
    manifest = manifest_of(outlines, 1, 0)
    senders = manifest.sent_by or [0] * len(manifest.buckets)
    sent: list[list[list[str]]] = [[] for _ in outlines]
    for bucket, sender in zip(manifest.buckets, senders, strict=True):
        sent[sender].append([manifest.tensors[index].name for index in bucket])
    for outline, found in zip(outlines, sent, strict=True):
        assert found == [[outline.specs[index].name for index in bucket] for bucket in outline.buckets], (
            "in the order in which the sender sends"
        )
    for at in range(1, len(senders)):
        others = set(senders[at:]) - {senders[at]}
        assert senders[at] != senders[at - 1] or not others, "nobody waits for two buckets of another in turn"
    assert Manifest.load(manifest.dump()) == manifest


@given(st.lists(st.lists(st.integers(1, 600), min_size=1, max_size=8), min_size=1, max_size=4))
def test_every_bucket_is_in_one_file(sizes: list[list[int]]) -> None:
    outlines = outlines_of(sizes)
    shards = plan(outlines)
    names = [name for mine in shards for name in mine]
    assert len(set(names)) == len(names)
    for outline, mine in zip(outlines, shards, strict=True):
        assert [number for numbers in mine.values() for number in numbers] == list(range(len(outline.buckets)))


def test_two_senders_of_one_tensor_are_refused() -> None:
    (outline,) = outlines_of([[3]])
    with pytest.raises(ManifestError, match="occurs twice"):
        manifest_of([outline, outline], 1, 0)


@pytest.mark.parametrize("wrong", [[0], [0, -1]])
def test_a_manifest_that_does_not_name_its_senders_is_refused(wrong: list[int]) -> None:
    manifest = manifest_of(outlines_of([[3], [4]]), 1, 0)
    with pytest.raises(SnapshotError, match="sent_by"):
        Manifest(1, 0, manifest.digest, [], manifest.tensors, manifest.buckets, wrong)


# -- at work ----------------------------------------------------------------------------------------------------------


class Trainer:
    """A publisher and two stages."""

    def __init__(self, world: World, stages: list[StageProcess], publisher: WeightPublisher) -> None:
        self.world, self.stages, self.publisher = world, stages, publisher

    async def publish(self, step: int, rows: int = 1000) -> int:
        found = weights(float(step), rows)

        def own() -> Iterator[tuple[str, torch.Tensor]]:
            """The ranks go through their tensors in step: when the leader's are exhausted, all are copied."""
            for stage, names in zip(self.stages, PARTS[1:], strict=True):
                stage.copy({name: found[name] for name in names})
            yield from ((name, found[name]) for name in PARTS[0])

        return await self.publisher.publish(step, own(), "update")


async def trainer(world: World) -> Trainer:
    stages = [await asyncio.to_thread(StageProcess, rank, world.config.dcs.timeout_s) for rank in range(1, len(PARTS))]
    for stage in stages:
        world.stack.callback(stage.kill)
    return Trainer(world, stages, await world.publisher(stages=[stage.address for stage in stages]))


async def answers(world: World, version: int, *replicas: Replica) -> set[str]:
    """How it came to each of them."""
    wanted = {replica.ctx.replica for replica in replicas}

    async def all_there() -> bool:
        return {r.replica for r in await world.received(version) if r.ok} == wanted

    await until(all_there, f"all have version {version}", DEADLINE_S)
    return {record.how for record in await world.received(version) if record.ok}


async def test_each_stage_writes_and_sends_its_own(world: World) -> None:
    train = await trainer(world)
    await train.publish(0)
    a, b = await asyncio.gather(world.replica("rollout-a"), world.replica("rollout-b"))
    for step in (1, 2):
        version = await train.publish(step, ROWS)
        assert await answers(world, version, a, b) == {"broadcast"}
        await train.publisher.settled()
    assert [await replica.engine.value() for replica in (a, b)] == [2.0, 2.0]
    assert a.engine.log.count("join") == len(PARTS), "the second version went through the same groups"
    told = (await world.announced())[-1]
    assert told.group is not None
    assert [one["port"] for one in told.group["senders"]][1:] != [], "a group of each"
    assert sorted(set(told.group["sent_by"])) == [0, 1, 2]
    folder = snapshots.folder(world.config.work_path / "snapshots", version)
    manifest = snapshots.read(folder.parent, version)
    assert manifest is not None
    assert snapshots.problems(folder, manifest) == []
    found = {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    expected = weights(2.0, ROWS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
async def halfway(make_world: Any, request: pytest.FixtureRequest) -> tuple[Trainer, Replica, Replica, int]:
    """A version that has one bucket through to `a` and `b`, and more to come: `b` holds it up."""
    world: World = await make_world(dcs={"timeout_s": getattr(request, "param", LONG_S)})
    await world.start_dcs()
    train = await trainer(world)
    await train.publish(0)
    await train.publisher.settled()
    a, b = await asyncio.gather(world.replica("rollout-a"), world.replica("rollout-b"))
    b.engine.hold.clear()
    b.engine.hold_at = 1
    version = await train.publish(1, ROWS)
    await until(lambda: b.engine.buckets == 1, "a bucket is through", DEADLINE_S)
    return train, a, b, version


async def ends_well(world: World, version: int, *live: Replica) -> None:
    for replica in live:
        await replica.holds(version, DEADLINE_S)
    assert [await replica.engine.value() for replica in live] == [1.0] * len(live)

    async def told() -> bool:
        return any(e.kind == "broadcast_failed" and f"version {version}" in e.message for e in await world.events())

    await until(told, "an event says that it failed", DEADLINE_S)


async def test_a_stage_that_is_killed_fails_the_broadcast_and_the_trainer(
    halfway: tuple[Trainer, Replica, Replica, int],
) -> None:
    train, a, b, version = halfway
    train.stages[0].kill()
    b.engine.hold.set()
    await ends_well(train.world, version, a, b)
    with pytest.raises(StageLost, match="rank 1, head of its pipeline stage, does not answer"):
        await train.publisher._senders[1].outline()


@pytest.mark.parametrize("halfway", [SHORT_S], indirect=True)
async def test_a_stage_that_is_stopped_holds_nobody_up(halfway: tuple[Trainer, Replica, Replica, int]) -> None:
    train, a, b, version = halfway
    os.kill(train.stages[1].pid, signal.SIGSTOP)
    b.engine.hold.set()
    await ends_well(train.world, version, a, b)
    os.kill(train.stages[1].pid, signal.SIGCONT)
    await train.publisher.settled()
    following = await train.publish(2)
    assert await answers(train.world, following, a, b) == {"broadcast"}


async def test_a_member_that_is_killed_frees_every_sender(halfway: tuple[Trainer, Replica, Replica, int]) -> None:
    train, a, b, version = halfway
    b.receiver._leaving = True  # its worker dies with its engine and tells nobody
    await b.stop()
    os.kill(b.engine.pid, signal.SIGKILL)
    await ends_well(train.world, version, a)
    following = await train.publish(2)
    assert await answers(train.world, following, a) == {"broadcast"}


async def test_what_a_stage_cannot_write_is_told_with_its_cause(world: World, tmp_path: Path) -> None:
    train = await trainer(world)
    await train.publish(0)
    await train.publisher.settled()
    gone = tmp_path / "not there"
    with pytest.raises(StageLost, match=r"rank 2, head of its pipeline stage: write: FileNotFoundError: .*not there"):
        await train.publisher._senders[2].write(gone, {"model.safetensors": [0]})
