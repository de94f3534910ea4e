"""The receiver alone: what it starts from, what it skips, and when it gives up."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from services.rollout.engines.client import EngineDead, EngineError
from services.rollout.weights import WeightReceiver
from shared.service import ServiceFailed
from tests.dcs.conftest import World
from tests.dcs.fake_engine import FakeEngine
from tests.shared.runs import until


async def test_it_waits_for_the_first_version(world: World) -> None:
    ctx = await world.context("rollout", "rollout-a")
    receiver = WeightReceiver(ctx, world.folder / "cache")
    waiting = asyncio.create_task(receiver.bootstrap())

    async def beats() -> bool:
        return any(beat.state == "waiting for weights" for beat in await world.ctx.registry.alive("rollout"))

    await until(beats, "the replica says what it waits for")
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    start = await waiting
    assert start is not None
    assert (start.version, start.step) == (1, 0)
    assert (start.folder / "model.safetensors").exists()
    assert receiver.version == -1  # pulled is not served


@pytest.mark.parametrize("with_dcs", [False, True])
async def test_told_to_stop_it_starts_from_nothing(make_world: object, with_dcs: bool) -> None:
    world: World = await make_world()  # type: ignore[operator]
    if with_dcs:
        await world.start_dcs()
    ctx = await world.context("rollout", "rollout-a")
    waiting = asyncio.create_task(WeightReceiver(ctx, world.folder / "cache").bootstrap())
    await asyncio.sleep(0)
    ctx.stopping.set()
    assert await waiting is None


async def test_old_announcements_are_skipped(world: World) -> None:
    publisher = await world.publisher()
    for step in range(4):
        await world.publish(publisher, step)
    await publisher.settled()
    a = await world.replica("rollout-a")
    assert a.receiver.version == 4
    version = await world.publish(publisher, 9)
    await a.holds(version)
    assert [(r.version, r.how) for r in await world.received()] == [(4, "snapshot"), (5, "broadcast")]
    a.receiver._read_from = 1
    again = WeightReceiver(a.ctx, world.folder / "cache" / "rollout-a")
    again._read_from = 1
    reading = asyncio.create_task(again._read())
    await until(lambda: again._newest and again._newest.version == version, "the whole log is read")
    assert [again.step_of(number) for number in range(1, 6)] == [0, 1, 2, 3, 9]
    reading.cancel()


async def test_only_a_broadcast_that_counts_on_this_very_engine_is_joined(world: World) -> None:
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    a = await world.replica("rollout-a")
    await world.publish(publisher, 1)
    await publisher.settled()
    told = (await world.announced())[-1]
    assert told.group is not None
    assert await a.receiver._rank_in(told) == 1
    assert await a.receiver._rank_in(replace(told, at=0.0)) == 1, "clocks of two hosts say nothing"
    assert await a.receiver._rank_in(replace(told, group=None)) is None
    again = {name: value for name, value in told.group.items() if name != "ranks"}
    assert await a.receiver._rank_in(replace(told, group=again)) == 1, "told once an epoch"
    assert await a.receiver._rank_in(replace(told, group=again | {"epoch": 99})) is None, (
        "it has not heard who is in that"
    )
    before_the_restart = told.group | {"ranks": {"of the engine before": 1}}
    assert await a.receiver._rank_in(replace(told, group=before_the_restart)) is None
    assert await a.receiver._rank_in(replace(told, group=again)) is None


async def test_whether_a_broadcast_goes_on_is_asked_of_the_dcs_where_there_is_doubt(world: World) -> None:
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    a = await world.replica("rollout-a")
    await world.publish(publisher, 1)
    await publisher.settled()
    over = (await world.announced())[-1]
    assert await a.receiver._rank_in(over) == 1
    a.receiver._pause_s = 60.0  # the broker may have been away
    assert await a.receiver._rank_in(over) is None
    a.receiver._pause_s = 0.0
    a.receiver._heard -= 60.0  # something took long here
    assert await a.receiver._rank_in(over) is None
    assert await a.receiver._rank_in(replace(over, version=99)) is None, "the DCS has never heard of it"


async def test_versions_that_were_missed_are_made_good_by_the_newest(world: World) -> None:
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    ctx = await world.context("rollout", "rollout-a")
    receiver = WeightReceiver(ctx, world.folder / "cache")
    start = await receiver.bootstrap()
    assert start is not None
    engine = FakeEngine(start.folder)
    try:
        for step in (1, 2, 3):  # while the engine starts
            await world.publish(publisher, step)
        await publisher.settled()
        await receiver.attach(engine, start)  # type: ignore[arg-type]
        following = asyncio.create_task(receiver.run())
        await until(lambda: receiver.version == 4, "it caught up")
        assert await engine.value() == 3.0
        assert engine.log.count("disk") == 1
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        assert await world.dcs.members() == []
    finally:
        engine.close()


async def test_a_dead_engine_ends_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.trainer.sender.JOIN_S", 2.0)
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    a = await world.replica("rollout-a")
    a.engine.process.kill()
    await world.publish(publisher, 1)
    with pytest.raises(EngineDead):
        await a.tasks[0]
    assert (await world.dcs.version(2))["dropped"] == ["rollout-a"]  # told at once, so that nobody waits for it
    await publisher.settled()
    assert await world.dcs.members() == []


async def test_an_engine_that_takes_no_weights_ends_it_with_the_reason(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.weights.BACK_OFF_S", (0.01,))
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    a = await world.replica("rollout-a")

    async def refuse(*_: object, **__: object) -> None:
        raise EngineError(400, "not for me")

    a.engine.update_from_buckets = a.engine.update_from_disk = refuse
    await world.publish(publisher, 1)
    with pytest.raises(ServiceFailed, match=r"version 2 could not be loaded in 5 tries: EngineError: not for me"):
        await a.tasks[0]
    assert a.receiver.version == 1
    assert await a.engine.value() == 0.0
