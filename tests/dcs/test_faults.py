"""What may happen to a version on its way: each fault strikes a broadcast that is under way, with real processes.

Publisher, DCS and engines are processes of their own. However a case ends, all live members hold a verified version, the one
that was struck or a later one, within `DEADLINE_S` of the fault, and an event says what happened: the table in docs/weights.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest

from services.dcs.versions import FAILED_GRACE_S
from shared.records import Event
from tests.dcs.conftest import Replica, World, weights
from tests.dcs.publisher_process import PublisherProcess
from tests.shared.runs import until

ROWS = 200_000
"""Of a version that takes several buckets of a megabyte."""
LONG_S = 300.0
"""dcs.timeout_s where the fault tells of itself, so that nobody has to wait for it."""
SHORT_S = 10.0
"""dcs.timeout_s where nothing else tells of the fault."""
PULL_S = 60.0
"""What reading the snapshot may take on a machine that does much else."""
DEADLINE_S = SHORT_S + FAILED_GRACE_S + PULL_S


@dataclass
class Broadcast:
    """A version that has one bucket through to `a` and `b`, and more to come: `b` holds it up."""

    world: World
    publisher: PublisherProcess
    a: Replica
    b: Replica
    version: int
    struck: float = 0.0

    def strike(self, pid: int, kind: signal.Signals) -> None:
        os.kill(pid, kind)
        self.struck = time.monotonic()

    def go_on(self) -> None:
        self.b.engine.hold.set()

    async def ends_well(self, *live: Replica, step: float = 1.0) -> None:
        """The live members serve the right bytes of this version or a later one, in time."""
        for replica in live:
            await replica.holds(self.version, DEADLINE_S)
        assert time.monotonic() - (self.struck or time.monotonic()) < DEADLINE_S
        for replica in live:
            assert await replica.engine.value() == step

    async def told(self, kind: str, *parts: str) -> Event:
        """The event that says what happened."""
        found: list[Event] = []

        async def is_told() -> bool:
            found[:] = [e for e in await self.world.events() if e.kind == kind and all(p in e.message for p in parts)]
            return bool(found)

        await until(is_told, f"an event {kind} with {parts}", DEADLINE_S)
        return found[-1]

    async def next_one_reaches(self, *members: Replica, step: int = 2) -> None:
        version = await self.publisher.publish(step)
        for member in members:
            await member.holds(version, DEADLINE_S)
        wanted = {member.ctx.replica: "broadcast" for member in members}

        async def answered() -> bool:
            return {r.replica: r.how for r in await self.world.received(version) if r.ok} == wanted

        await until(answered, f"all got version {version} by broadcast")


@pytest.fixture
async def broadcast(make_world: Any, request: pytest.FixtureRequest) -> Broadcast:
    """Stopped half-way."""
    world: World = await make_world(dcs={"timeout_s": getattr(request, "param", LONG_S)})
    world.dcs_child = await world.dcs_process()
    await world.dcs_answers()
    publisher = publisher_of(world, "trainer-0")
    await publisher.publish(0)
    await publisher.settled()
    a, b = await asyncio.gather(world.replica("rollout-a"), world.replica("rollout-b"))
    b.engine.hold.clear()
    b.engine.hold_at = 1
    version = await publisher.publish(1, ROWS)
    await until(lambda: b.engine.buckets == 1, "a bucket is through")
    return Broadcast(world, publisher, a, b, version)


def publisher_of(world: World, name: str) -> PublisherProcess:
    publisher = PublisherProcess(world.url, world.config.dump(), world.model_dir, name)
    world.stack.callback(publisher.kill)
    return publisher


async def test_a_receiver_that_is_killed_is_left_behind(broadcast: Broadcast) -> None:
    a, b = broadcast.a, broadcast.b
    b.receiver._leaving = True  # its worker dies with its engine and tells nobody
    await b.stop()
    broadcast.strike(b.engine.pid, signal.SIGKILL)
    await broadcast.ends_well(a)
    await broadcast.told("broadcast_failed", f"version {broadcast.version}")
    await broadcast.told("member_dropped", "rollout-b")
    await broadcast.next_one_reaches(a)


@pytest.mark.parametrize("broadcast", [SHORT_S], indirect=True)
async def test_a_receiver_that_is_stopped_is_left_behind_and_comes_back(broadcast: Broadcast) -> None:
    a, b = broadcast.a, broadcast.b
    broadcast.strike(b.engine.pid, signal.SIGSTOP)
    broadcast.go_on()
    await broadcast.ends_well(a)
    await broadcast.told("member_dropped", "rollout-b")
    await broadcast.told("broadcast_failed", f"version {broadcast.version}")
    broadcast.strike(b.engine.pid, signal.SIGCONT)
    await broadcast.ends_well(a, b)
    await until(lambda: members(broadcast.world, 2), "it is a member again", DEADLINE_S)
    await broadcast.next_one_reaches(a, b)


async def test_a_newcomer_starts_on_the_version_that_is_being_sent(broadcast: Broadcast) -> None:
    newcomer = await broadcast.world.replica("rollout-c")
    broadcast.struck = time.monotonic()
    assert newcomer.receiver.version == broadcast.version
    broadcast.go_on()
    await broadcast.ends_well(broadcast.a, broadcast.b, newcomer)
    await broadcast.told("member_joined", "rollout-c")
    await broadcast.next_one_reaches(broadcast.a, broadcast.b, newcomer)
    await broadcast.told("regrouped", "rollout-c came")


@pytest.mark.parametrize("broadcast", [SHORT_S], indirect=True)
async def test_after_the_publisher_is_killed_the_members_pull_what_it_announced(broadcast: Broadcast) -> None:
    broadcast.publisher.kill()
    broadcast.struck = time.monotonic()
    broadcast.go_on()
    await broadcast.ends_well(broadcast.a, broadcast.b)
    await broadcast.told("weights_refused", "rollout-a", f"version {broadcast.version}")
    await broadcast.told("broadcast_failed", "the publisher gave no result by the deadline")
    broadcast.publisher = publisher_of(broadcast.world, "trainer-1")
    await broadcast.next_one_reaches(broadcast.a, broadcast.b)


async def test_a_dcs_that_is_killed_carries_on(broadcast: Broadcast) -> None:
    broadcast.strike(broadcast.world.dcs_child.pid, signal.SIGKILL)
    await broadcast.world.dcs_child.wait()
    broadcast.go_on()
    await broadcast.world.dcs_process()
    await broadcast.ends_well(broadcast.a, broadcast.b)
    await broadcast.publisher.settled()
    await broadcast.told("carried_on", f"{broadcast.version} versions so far")
    assert {r.how for r in await broadcast.world.received(broadcast.version)} == {"broadcast"}
    await broadcast.next_one_reaches(broadcast.a, broadcast.b)


async def test_a_flipped_bit_is_refused_reported_and_sent_again(broadcast: Broadcast) -> None:
    broadcast.b.engine.corrupt = 1
    broadcast.struck = time.monotonic()
    broadcast.go_on()
    await broadcast.ends_well(broadcast.a, broadcast.b)
    await broadcast.told("weights_refused", "rollout-b", "have other checksums")
    answers = [(r.how, r.ok) for r in await broadcast.world.received(broadcast.version) if r.replica == "rollout-b"]
    assert answers == [("broadcast", False), ("snapshot", True)]
    await broadcast.next_one_reaches(broadcast.a, broadcast.b)


@pytest.mark.parametrize("broadcast", [2 * SHORT_S], indirect=True)  # the others must be through by then
async def test_a_truncated_snapshot_is_never_served(broadcast: Broadcast, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was left behind finds it so, and waits for the next version."""
    monkeypatch.setattr(
        "services.rollout.weights.BACK_OFF_S", (0.2, 3600.0)
    )  # it may take what it may on a slow machine
    world, b = broadcast.world, broadcast.b
    file = world.config.work_path / "snapshots" / f"v{broadcast.version}" / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    b.engine.corrupt = 1
    broadcast.struck = time.monotonic()
    broadcast.go_on()
    await broadcast.told("weights_refused", "rollout-b", "model.safetensors")
    await broadcast.a.holds(broadcast.version, DEADLINE_S)
    assert (await b.engine.value(), b.receiver.version) == (0.0, broadcast.version - 1)
    await broadcast.publisher.settled()
    broadcast.version = await broadcast.publisher.publish(2)
    await broadcast.ends_well(broadcast.a, b, step=2.0)


async def members(world: World, count: int) -> bool:
    return len(await world.dcs.members()) == count


def test_the_rows_make_several_buckets() -> None:
    assert sum(t.numel() * t.element_size() for t in weights(0.0, ROWS).values()) > 4 << 20
