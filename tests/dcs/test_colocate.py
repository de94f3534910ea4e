"""Trainer and engines on one device, with a real broker, DCS, publisher and receivers: whoever dies in the handshake, the others
go on, nobody meets the other on the device, and no shared memory is left."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from services.dcs import segments
from services.rollout.engines.client import EngineDead
from services.rollout.seat import Seat
from services.trainer import turn
from services.trainer.turn import DeviceTurn
from services.trainer.weights import WeightPublisher
from shared.service import ServiceFailed
from tests.dcs.conftest import Replica, World
from tests.dcs.fake_engine import FakeEngine
from tests.shared.runs import until


@dataclass
class Device:
    """Who is on it in truth."""

    engines: list[FakeEngine] = field(default_factory=list)
    trainer: str = ""
    turns: int = 0

    def check(self) -> None:
        awake = [engine for engine in self.engines if not engine.asleep and engine.process.is_alive()]
        assert not (self.trainer and awake), f"{self.trainer} met {len(awake)} engines on the device"


@dataclass
class Models:
    """A trainer's, which only look around."""

    device: Device
    name: str

    def sleep(self) -> None:
        self.device.check()
        self.device.trainer = ""

    def wake(self) -> None:
        self.device.trainer = self.name
        self.device.turns += 1
        self.device.check()


@dataclass
class Trainer:
    turn: DeviceTurn
    publisher: WeightPublisher

    async def update(self, world: World, step: int) -> int:
        """One turn of the trainer. The version that it ends with."""
        assert await self.turn.take()
        await world.publish(self.publisher, step)
        return await self.give()

    async def give(self) -> int:
        version = await self.publisher.announced()
        await self.turn.give(version, self.publisher.unshare)
        return version


@dataclass
class Colocated:
    """A run on one device."""

    world: World
    device: Device = field(default_factory=Device)

    async def trainer(self, name: str = "trainer-0") -> Trainer:
        """As services/trainer/main.py does it: the turn first, then whatever needs the device."""
        turn = DeviceTurn(await self.world.context("trainer", name))
        assert await turn.take()
        turn.policy = Models(self.device, name)
        turn.policy.wake()
        return Trainer(turn, await self.world.publisher(name))

    async def seat(self, name: str) -> tuple[Replica, Seat, asyncio.Task[None]]:
        """As services/rollout/main.py does it."""
        ctx = await self.world.context("rollout", name)
        await ctx.beat("starting")
        seat = Seat(ctx)
        assert await seat.enter()
        replica = await self.world.replica(name)
        self.device.engines.append(replica.engine)
        running = asyncio.create_task(seat.run(replica.engine, replica.receiver))
        self.world.stack.push_async_callback(_end, running)
        return replica, seat, running

    def shared(self) -> list[str]:
        prefix = segments.prefix(self.world.config.run, self.world.config.workdir)
        return [path.name for path in segments.FOLDER.glob(f"{prefix}*")]


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def run(make_world: Any) -> AsyncIterator[Colocated]:
    world: World = await make_world(placement="colocate", heartbeat_ttl_s=2.0)
    await world.start_dcs()
    colocated = Colocated(world)
    yield colocated
    segments.sweep(segments.prefix(world.config.run, world.config.workdir))


async def holds(seats: list[tuple[Replica, Seat, Any]], version: int, value: float) -> None:
    await asyncio.gather(*(_holds(*one, version, value) for one in seats))


async def _holds(replica: Replica, seat: Seat, running: asyncio.Task[None], version: int, value: float) -> None:
    def serves() -> bool:
        if running.done():
            running.result()
        return replica.receiver.version >= version and seat.open

    await until(serves, f"version {version} is served")
    assert await replica.engine.value() == value
    assert not replica.engine.paused
    assert not replica.engine.released


async def answers(run: Colocated, version: int, count: int) -> list[tuple[str, bool]]:
    """What the replicas said of a version; they serve it a moment before."""

    async def told() -> bool:
        return len(await run.world.received(version)) >= count

    await until(told, f"{count} answers to version {version}")
    return [(one.how, one.ok) for one in await run.world.received(version)]


async def test_turns_are_taken_and_weights_go_through_shared_memory(run: Colocated) -> None:
    trainer = await run.trainer()
    await run.world.publish(trainer.publisher, 0)
    assert await trainer.give() == 1
    seats = [await run.seat("rollout-a"), await run.seat("rollout-b")]
    for step in (1, 2, 3):
        version = await trainer.update(run.world, step)
        await holds(seats, version, float(step))
        await until(lambda: run.shared() == [], "the segments go when both have taken them")
        assert await answers(run, version, 2) == [("shared", True)] * 2
    assert run.device.turns == 4
    assert (trainer.turn.sleeps, trainer.turn.wakes) == (4, 3)
    assert [(seat.sleeps, seat.wakes) for _, seat, _ in seats] == [(3, 3)] * 2
    assert [told.step for told in await run.world.announced()] == [0, 1, 2, 3]
    await trainer.publisher.settled()
    assert (await run.world.dcs.latest())["version"] == version, "its snapshot is there for newcomers"


async def test_a_request_that_runs_is_waited_for(run: Colocated) -> None:
    trainer = await run.trainer()
    await run.world.publish(trainer.publisher, 0)
    await trainer.give()
    replica, seat, _ = await run.seat("rollout-a")
    with seat.drawing():
        taking = asyncio.create_task(trainer.turn.take())
        await until(lambda: not seat.open, "nothing more is begun")
        await asyncio.sleep(0.3)
        assert not taking.done()
        assert not replica.engine.asleep
    assert await taking
    assert replica.engine.asleep


async def test_without_the_segments_the_snapshot_is_taken(run: Colocated) -> None:
    trainer = await run.trainer()
    await run.world.publish(trainer.publisher, 0)
    await trainer.give()
    seats = [await run.seat("rollout-a")]
    assert await trainer.turn.take()
    await run.world.publish(trainer.publisher, 1)
    trainer.publisher.unshare()
    version = await trainer.give()
    await holds(seats, version, 1.0)
    assert await answers(run, version, 2) == [("shared", False), ("snapshot", True)]


async def test_a_flipped_bit_is_refused_and_made_good(run: Colocated) -> None:
    trainer = await run.trainer()
    await run.world.publish(trainer.publisher, 0)
    await trainer.give()
    seats = [await run.seat("rollout-a")]
    seats[0][0].engine.corrupt = 1
    version = await trainer.update(run.world, 1)
    await holds(seats, version, 1.0)
    assert await answers(run, version, 2) == [("shared", False), ("snapshot", True)]


async def test_a_replica_that_died_awake_is_not_waited_for(run: Colocated) -> None:
    trainer = await run.trainer()
    await run.world.publish(trainer.publisher, 0)
    await trainer.give()
    replica, _, running = await run.seat("rollout-a")
    others = [await run.seat("rollout-b")]
    await _end(running)
    await replica.stop()
    replica.engine.close()
    version = await trainer.update(run.world, 1)
    await holds(others, version, 1.0)
    told = [event.detail["replicas"] for event in await run.world.events() if event.kind == "turn_put_out"]
    assert told == [["rollout-a"]]


async def test_a_heartbeat_that_comes_back_gives_nobody_up(make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran out while the broker or the machine stood still; the engine has the device all the time."""
    run = Colocated(await make_world(placement="colocate", heartbeat_ttl_s=60.0))
    await run.world.start_dcs()
    trainer = await run.trainer()
    await run.world.publish(trainer.publisher, 0)
    await trainer.give()
    replica, seat, running = await run.seat("rollout-a")
    await _end(running)  # it takes its time to sleep
    registry, looks = trainer.turn._ctx.registry, 0
    known = registry.living

    async def living(replicas: Any) -> set[str]:
        nonlocal looks
        looks += 1
        return set() if looks <= 5 else await known(replicas)

    monkeypatch.setattr(registry, "living", living)
    later = SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + 3600)  # since it sat down
    monkeypatch.setattr(turn, "time", later)
    taking = asyncio.create_task(trainer.turn.take())
    await until(lambda: looks > 10 or taking.done(), "the trainer looks at it again and again")
    assert not taking.done()
    going_on = asyncio.create_task(seat.run(replica.engine, replica.receiver))
    run.world.stack.push_async_callback(_end, going_on)
    assert await taking
    assert replica.engine.asleep
    assert not [event for event in await run.world.events() if event.kind == "turn_put_out"]


async def test_a_replica_that_is_started_again_is_seen_at_once(run: Colocated) -> None:
    """Under its own name, while the trainer waits for the engine that it had."""
    trainer = await run.trainer()
    await run.world.publish(trainer.publisher, 0)
    await trainer.give()
    replica, _, running = await run.seat("rollout-a")
    await _end(running)
    replica.engine.close()  # its heart goes on beating: only its successor can tell
    taking = asyncio.create_task(trainer.turn.take())
    await asyncio.sleep(0.3)
    assert not taking.done()
    again = asyncio.create_task(run.seat("rollout-a"))
    assert await taking
    assert not again.done()
    await run.world.publish(trainer.publisher, 1)
    version = await trainer.give()
    await holds([await again], version, 1.0)


async def test_an_engine_that_dies_asleep_gives_way_to_another(run: Colocated) -> None:
    trainer = await run.trainer()
    await run.world.publish(trainer.publisher, 0)
    await trainer.give()
    replica, seat, running = await run.seat("rollout-a")
    assert await trainer.turn.take()
    replica.engine.process.kill()
    await run.world.publish(trainer.publisher, 1)
    await trainer.give()
    with pytest.raises(EngineDead):
        await running
    await replica.stop()
    await seat.leave()
    await holds([await run.seat("rollout-a")], 2, 1.0)


async def test_a_trainer_killed_in_its_turn_has_a_successor(run: Colocated) -> None:
    first = await run.trainer()
    await run.world.publish(first.publisher, 0)
    await first.give()
    seats = [await run.seat("rollout-a")]
    assert await first.turn.take()
    await run.world.publish(first.publisher, 1)
    await first.publisher.announced()  # and here it is stopped, its weights announced and never given
    run.device.trainer = ""
    second = await run.trainer("trainer-1")
    assert run.shared() == []
    await run.world.publish(second.publisher, 0)
    version = await second.give()
    await holds(seats, version, 0.0)
    run.device.trainer = ""
    with pytest.raises(ServiceFailed, match="another trainer has asked"):
        await first.give()


async def test_a_trainer_killed_while_engines_wake_has_a_successor(run: Colocated) -> None:
    """An engine stands between sleep and new weights, and what it waits for will never be there."""
    first = await run.trainer()
    await run.world.publish(first.publisher, 0)
    await first.give()
    seats = [await run.seat("rollout-a")]
    replica, seat, _ = seats[0]
    assert await first.turn.take()
    await first.publisher.settled()
    await first.turn.give(99, first.publisher.unshare)
    await until(lambda: seat.state == "waking", "the engine has its memory and no weights")
    second = await run.trainer("trainer-1")
    assert replica.engine.asleep
    await run.world.publish(second.publisher, 0)
    await holds(seats, await second.give(), 0.0)


async def test_the_dcs_may_die_in_the_trainers_turn(make_world: Any) -> None:
    world: World = await make_world(placement="colocate", heartbeat_ttl_s=2.0)
    run = Colocated(world)
    dcs = await world.dcs_process()
    await world.dcs_answers()
    trainer = await run.trainer()
    await world.publish(trainer.publisher, 0)
    await trainer.give()
    seats = [await run.seat("rollout-a")]
    await trainer.publisher.settled()
    assert await trainer.turn.take()
    dcs.send_signal(signal.SIGKILL)
    await dcs.wait()
    publishing = asyncio.create_task(world.publish(trainer.publisher, 1))
    await asyncio.sleep(0.3)
    assert not publishing.done()
    await world.dcs_process()
    await publishing
    await holds(seats, await trainer.give(), 1.0)
    await until(lambda: run.shared() == [], "nothing is left in shared memory")
