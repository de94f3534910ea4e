"""Heartbeats that run out, and leases of which there is one."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from shared import wire
from shared.broker import EmbeddedBroker
from shared.errors import AlreadyActive, LeaseLost
from shared.records import Heartbeat
from shared.registry import LeaseRecord, Registry, is_dead, process_start
from shared.subjects import Subjects
from tests.shared.runs import until
from tests.stalls import unless_stalled


def a_beat(service: str, replica: str, progress: int = 0) -> Heartbeat:
    return Heartbeat(service, replica, "running", progress, 1, 1, {}, "host", 1, 0.0, time.time())


async def registry(connect: Any, url: str, run: str, ttl_s: float = 15.0) -> Registry:
    return await Registry.open(await connect(url), Subjects(run), ttl_s)


async def test_alive_until_the_heartbeat_runs_out(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    short = await registry(connect, broker.url, run_name, ttl_s=1)
    long = await registry(connect, broker.url, run_name, ttl_s=600)
    await long.beat(a_beat("rollout", "host-1.local"))
    await long.beat(a_beat("rollout", "b", progress=1))
    await long.beat(a_beat("rollout", "b", progress=2))
    await long.beat(a_beat("trainer", "0"))
    assert [(h.service, h.replica, h.progress) for h in await long.alive()] == [
        ("rollout", "b", 2),
        ("rollout", "host-1.local", 0),
        ("trainer", "0", 0),
    ]
    assert await long.living(["host-1.local", "0", "c"]) == {"host-1.local", "0"}

    await short.beat(a_beat("rollout", "host-1.local"))

    async def only_b() -> bool:
        return [h.replica for h in await long.alive("rollout")] == ["b"]

    await until(only_b, "the dead replica is gone")
    assert await long.living(["host-1.local", "b"]) == {"b"}
    await long.leave("rollout", "b")
    assert await long.alive("rollout") == []


async def test_who_fails_takes_its_own_heartbeat_along(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    one = await registry(connect, broker.url, run_name)
    mine = a_beat("rollout", "a")
    await one.withdraw(mine)  # it may never have beaten
    await one.beat(replace(mine, pid=2))
    await one.withdraw(mine)
    assert [h.pid for h in await one.alive()] == [2], "another process has the name"
    await one.beat(mine)
    await one.withdraw(mine)
    assert await one.alive() == []


async def test_one_active(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    first = await registry(connect, broker.url, run_name)
    second = await registry(connect, broker.url, run_name)
    lease = await first.claim("trainer", "a")
    with pytest.raises(AlreadyActive, match=rf"trainer is active already: replica 'a', pid {os.getpid()} on"):
        await second.claim("trainer", "b")
    await second.claim("dcs", "b")
    await lease.release()
    taken = await second.claim("trainer", "b")
    with pytest.raises(LeaseLost, match="no longer holds the lease of trainer"):
        await lease.renew()
    await lease.release()
    await taken.renew()


async def test_claims_at_once(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    rivals = [await registry(connect, broker.url, run_name) for _ in range(4)]
    results = await asyncio.gather(*(rival.claim("trainer") for rival in rivals), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["AlreadyActive"] * 3 + ["Lease"]


async def test_who_is_beaten_to_a_lease_that_ran_out_hears_that_it_is_taken(
    broker: EmbeddedBroker, connect: Any, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = [await registry(connect, broker.url, run_name) for _ in range(2)]
    await first.claim("trainer", "a")

    async def nothing(key: str) -> None:
        """Seen between the end of one lease and the start of the next."""

    monkeypatch.setattr(second._kv, "get", nothing)
    with pytest.raises(AlreadyActive, match="another process took it over just now"):
        await second.claim("trainer", "b")


async def test_beats_keep_the_lease_and_hear_of_its_loss(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    first = await registry(connect, broker.url, run_name, ttl_s=2)
    second = await registry(connect, broker.url, run_name, ttl_s=600)

    async def keep(number: int) -> None:
        service = f"trainer{number}"
        await first.claim(service, "a")
        for _ in range(4):
            await asyncio.sleep(0.6)
            await first.beat(a_beat(service, "a"))
            with pytest.raises(AlreadyActive):
                await second.claim(service, "b")
        await until(lambda: _claims(second, service), "a silent holder loses the lease")
        with pytest.raises(LeaseLost, match="replica 'b'"):
            await first.beat(a_beat(service, "a"))

    await unless_stalled(keep, await connect(broker.url), 0.2)


async def test_lease_that_merely_ran_out_is_taken_again(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    only = await registry(connect, broker.url, run_name, ttl_s=1)
    other = await registry(connect, broker.url, run_name)
    lease = await only.claim("trainer")

    async def ran_out() -> bool:
        return await only._kv.get("lease.trainer") is None

    await until(ran_out, "the lease ran out")
    only.ttl_s = 600
    await only.beat(a_beat("trainer", "0"))
    with pytest.raises(AlreadyActive):
        await other.claim("trainer")
    await lease.release()


async def test_a_break_in_the_lease_is_told_once(
    broker: EmbeddedBroker, connect: Any, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who stood still for longer than the TTL must look at what another may have done, even if the lease is free again."""
    now = 0.0
    monkeypatch.setattr("shared.registry._now", lambda: now)
    only = await registry(connect, broker.url, run_name, ttl_s=600)
    assert await only.assure("trainer"), "nobody asked for a lease"
    lease = await only.claim("trainer")
    for _ in range(3):
        now += 400
        assert await only.assure("trainer"), "asking keeps it"
        assert lease.renewed == now
    now += 700
    await only.beat(a_beat("trainer", "0"))
    assert not await only.assure("trainer")
    assert await only.assure("trainer")
    now += 700
    await only._kv.delete("lease.trainer")  # as the broker does by then
    await (await registry(connect, broker.url, run_name)).claim("trainer")
    with pytest.raises(LeaseLost):
        await only.assure("trainer")


async def _claims(registry: Registry, service: str) -> bool:
    try:
        await registry.claim(service, "b")
    except AlreadyActive:
        return False
    return True


async def test_neighbour_sees_a_dead_process_at_once(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    here = await registry(connect, broker.url, run_name)
    code = "import sys; sys.stdin.read()"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE)
    record = LeaseRecord("trainer", "a", "token", socket.gethostname(), child.pid, process_start(child.pid), 0.0)
    await here._kv.create("lease.trainer", wire.encode(record), ttl_s=600)
    with pytest.raises(AlreadyActive):
        await here.claim("trainer", "b")
    child.kill()
    await child.wait()
    await here.claim("trainer", "b")


def test_who_is_dead() -> None:
    here, me = socket.gethostname(), os.getpid()
    alive = LeaseRecord("s", "r", "t", here, me, process_start(me), 0.0)
    assert not is_dead(alive)
    assert is_dead(LeaseRecord("s", "r", "t", here, me, process_start(me) - 1, 0.0)), (
        "the pid was given to another process"
    )
    assert not is_dead(LeaseRecord("s", "r", "t", "another-host", me, 1, 0.0)), "only its own host can tell"
    assert process_start(2**22 + 1) == 0


@pytest.mark.parametrize("ran_out", [False, True], ids=["renewed", "taken again"])
async def test_own_write_that_was_stored_without_an_answer_is_no_loss(
    broker: EmbeddedBroker, connect: Any, run_name: str, ran_out: bool
) -> None:
    """A broker whose disk is full may store a renewal and not say so: the key is at a revision that its holder does not know."""
    ours = await registry(connect, broker.url, run_name)
    lease = await ours.claim("controller", "a")
    if ran_out:
        await ours._kv.delete(lease._key)
    await ours._kv.put(lease._key, wire.encode(lease.record), ttl_s=15)
    await lease.renew()
    await lease.renew()
    other = await registry(connect, broker.url, run_name)
    with pytest.raises(AlreadyActive, match="replica 'a'"):
        await other.claim("controller", "b")
