"""Publisher, DCS and receivers together, over a real broker and real process groups; engines die and hang."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import torch
from safetensors.torch import save_file

from services.trainer.weights import WeightPublisher
from shared.service import ServiceFailed
from tests.dcs.conftest import Replica, World, weights
from tests.dcs.fake_engine import FakeEngine
from tests.shared.runs import until

BIG = 200_000
"""Rows that make several buckets of a megabyte."""
LONG_S = 600.0
"""dcs.timeout_s where nobody may wait for it."""


async def two_replicas(world: World) -> tuple[WeightPublisher, Replica, Replica]:
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    await publisher.settled()
    a, b = await asyncio.gather(world.replica("rollout-a"), world.replica("rollout-b"))
    return publisher, a, b


async def test_weights_reach_every_engine_by_broadcast(world: World) -> None:
    publisher, a, b = await two_replicas(world)
    assert (a.receiver.version, a.receiver.step) == (1, 0)
    for step in (1, 2, 3):
        version = await world.publish(publisher, step)
        await publisher.settled()
        for replica in (a, b):
            await replica.holds(version)
            assert await replica.engine.value() == step
            assert replica.receiver.step_of(version) == step
            assert replica.engine.version == str(version)
    groups = [told.group for told in await world.announced()]
    assert [group and group["epoch"] for group in groups] == [None, 1, 1, 1]
    assert [group and "ranks" in group for group in groups] == [None, True, False, False], "told once an epoch"
    assert {(r.replica, r.how, r.ok) for r in await world.received(4)} == {
        ("rollout-a", "broadcast", True),
        ("rollout-b", "broadcast", True),
    }
    assert [member["held"] for member in await world.dcs.members()] == [4, 4]
    assert a.engine.log.count("join") == 1


async def test_training_goes_on_while_members_are_slow(world: World) -> None:
    publisher, a, _ = await two_replicas(world)
    a.engine.hold.clear()
    tensors = weights(1.0)
    version = await asyncio.wait_for(world.publish(publisher, 1, tensors), 60)
    for tensor in tensors.values():
        tensor.zero_()  # the copy is what is sent
    assert a.receiver.version < version
    a.engine.hold.set()
    await a.holds(version)
    await publisher.settled()
    assert await a.engine.value() == 1.0


async def test_an_engine_killed_in_the_broadcast_does_not_hold_up_the_others(make_world: object) -> None:
    world: World = await make_world(dcs={"timeout_s": LONG_S})  # type: ignore[operator]
    await world.start_dcs()
    publisher, a, b = await two_replicas(world)
    b.engine.hold.clear()
    version = await world.publish(publisher, 1, weights(1.0, BIG))
    await until(lambda: "begin" in a.engine.log and "begin" in b.engine.log, "the broadcast runs")
    os.kill(b.engine.pid, signal.SIGKILL)
    b.engine.hold.set()
    async with asyncio.timeout(LONG_S / 2):
        await publisher.settled()
        await a.holds(version)
    assert await a.engine.value() == 1.0
    assert [(r.how, r.ok) for r in await world.received(version) if r.replica == "rollout-a"] == [
        ("broadcast", False),
        ("snapshot", True),
    ]
    third = await world.publish(publisher, 2)
    await publisher.settled()
    assert [(r.replica, r.how) for r in await world.received(third)] == [("rollout-a", "broadcast")]
    assert list((await world.announced())[-1].group["ranks"].values()) == [1]  # type: ignore[index]


async def test_an_engine_that_is_dead_before_the_group_meets_costs_the_others_little(
    make_world: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.sender.JOIN_S", 2.0)
    world: World = await make_world(dcs={"timeout_s": LONG_S})  # type: ignore[operator]
    await world.start_dcs()
    publisher, a, b = await two_replicas(world)
    b.engine.process.kill()
    async with asyncio.timeout(LONG_S / 2):
        version = await world.publish(publisher, 1)
        await publisher.settled()
        await a.holds(version)
    assert [member["replica"] for member in await world.dcs.members()] == ["rollout-a"]


async def _members(world: World, count: int) -> bool:
    return len(await world.dcs.members()) == count


async def test_other_bytes_are_refused_and_pulled(world: World) -> None:
    publisher, a, _ = await two_replicas(world)
    a.engine.corrupt = 1
    version = await world.publish(publisher, 1)
    await publisher.settled()
    await a.holds(version)
    assert a.engine.log[-8:] == ["bucket", "checksums", "drop", "leave", "begin", "disk", "checksums", "end"]
    assert await a.engine.value() == 1.0
    records = [r for r in await world.received(version) if r.replica == "rollout-a"]
    assert [(r.how, r.ok) for r in records] == [("broadcast", False), ("snapshot", True)]
    assert "other checksums" in records[0].error
    assert "weights_refused" in [event.kind for event in await world.events()]


async def test_a_restarted_trainer_publishes_on_and_the_old_one_is_refused(world: World) -> None:
    old, a, _ = await two_replicas(world)
    last = await world.publish(old, 1)
    await old.settled()
    fresh = await world.publisher("trainer-1")
    version = await world.publish(fresh, 0)
    await fresh.settled()
    assert version == last + 1
    await a.holds(version)
    assert a.receiver.step == 0
    assert [told.group["epoch"] for told in (await world.announced())[1:] if told.group] == [1, 2]
    with pytest.raises(ServiceFailed, match="replaced by a newer trainer"):
        await world.publish(old, 2)


async def test_an_engine_that_leaves_is_not_waited_for(world: World) -> None:
    publisher, a, b = await two_replicas(world)
    await b.receiver.leave()
    version = await world.publish(publisher, 1)
    await publisher.settled()
    assert (await world.dcs.version(version))["answers"]["rollout-a"] == "broadcast"
    assert [member["replica"] for member in await world.dcs.members()] == ["rollout-a"]
    await a.holds(version)


async def test_who_leaves_in_the_middle_finishes_the_broadcast(world: World) -> None:
    publisher, a, b = await two_replicas(world)
    b.engine.hold.clear()
    version = await world.publish(publisher, 1)
    await until(lambda: "begin" in b.engine.log, "the broadcast runs")
    leaving = asyncio.create_task(b.receiver.leave())
    await until(lambda: _members(world, 1), "b is out of the next group")
    b.engine.hold.set()
    await asyncio.gather(leaving, publisher.settled())
    assert b.receiver.version == version
    assert {r.how for r in await world.received(version)} == {"broadcast"}
    await a.holds(version)


async def test_engines_that_do_not_stage_are_paused_for_the_update(world: World) -> None:
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    a = await world.replica("rollout-a", staged=False)
    version = await world.publish(publisher, 1)
    await publisher.settled()
    await a.holds(version)
    assert a.engine.log[-8:] == ["join", "pause retract", "begin", "bucket", "bucket", "end", "checksums", "resume"]
    a.engine.corrupt = 1
    version = await world.publish(publisher, 2)
    await a.holds(version)
    failed = ["pause retract", "begin", "bucket", "bucket", "end", "checksums", "leave"]  # and stays paused until
    assert a.engine.log[-11:] == [*failed, "pause retract", "disk", "checksums", "resume"]
    assert await a.engine.value() == 2.0


async def test_an_engine_that_cannot_be_verified_only_gets_verified_files(world: World) -> None:
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    a = await world.replica("rollout-a", staged=False, verifiable=False)
    version = await world.publish(publisher, 1)
    await publisher.settled()
    await a.holds(version)
    assert (await world.announced())[-1].group is None
    assert [(r.how, r.ok) for r in await world.received(version)] == [("snapshot", True)]
    assert await a.engine.value() == 1.0


async def test_what_the_engine_loaded_is_verified_before_it_serves(world: World) -> None:
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    folder = world.folder / "other"
    folder.mkdir()
    save_file(weights(1.0), folder / "model.safetensors")
    engine = FakeEngine(folder)
    try:
        with pytest.raises(ServiceFailed, match="the engine loaded other weights than version 1 holds"):
            await world.replica("rollout-a", engine)
    finally:
        engine.close()
    assert await world.received() == []


async def test_wait_step_tells_of_served_weights_only(world: World) -> None:
    publisher, a, _ = await two_replicas(world)
    assert await a.receiver.wait_step(0, 0.1)
    assert not await a.receiver.wait_step(1, 0.1)
    waiting = asyncio.create_task(a.receiver.wait_step(1, 60.0))
    await world.publish(publisher, 1)
    assert await waiting
    assert await a.engine.value() == 1.0
    with pytest.raises(KeyError):
        a.receiver.step_of(99)


async def test_dtypes_arrive_as_they_are(world: World) -> None:
    publisher = await world.publisher()
    await world.publish(publisher, 0, weights(0.0, dtype=torch.bfloat16))
    a = await world.replica("rollout-a")
    version = await world.publish(publisher, 1, weights(1.0, dtype=torch.bfloat16))
    await publisher.settled()
    await a.holds(version)
    told = (await world.announced())[-1]
    assert dict(zip(told.names, told.dtypes, strict=True))["embed"] == "bfloat16"
    assert {r.how for r in await world.received(version)} == {"broadcast"}
