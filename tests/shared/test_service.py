"""What a service's context promises: heartbeats come from the loop, go on over long waits, and stop where something hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

from shared import service
from shared.errors import AccessDenied, LeaseLost
from shared.jetstream import Connection
from shared.kv import KV
from shared.records import Heartbeat
from shared.registry import Registry
from shared.service import Context
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue
from tests.shared.runs import make_config, until


@pytest.fixture
async def ctx(broker, connect, run_name, monkeypatch) -> AsyncIterator[Context]:
    monkeypatch.setattr(service, "BEAT_EVERY_S", 0.05)
    monkeypatch.setattr(service, "CHANGE_EVERY_S", 0.0)
    connection: Connection = await connect(broker.url)
    subjects = Subjects(run_name)
    kv = await KV.open(connection, subjects.config_bucket)
    registry = await Registry.open(connection, subjects, ttl_s=600)
    config = make_config(run_name)
    config.hang_timeout_s = 0.2
    context = Context("rollout", "rollout-0", config, connection, TransferQueue(connection, subjects), kv, registry)
    yield context
    context.close()


async def seen(ctx: Context) -> Heartbeat | None:
    return next(iter(await ctx.registry.alive()), None)


async def test_what_a_beat_does_not_say_stays_as_it_was(ctx):
    await ctx.beat("sampling", progress=3, version=7, step=2, running=4)
    await ctx.beat("idle")
    beat = await seen(ctx)
    assert (beat.state, beat.progress, beat.version, beat.step, beat.detail) == ("idle", 3, 7, 2, {"running": 4})


async def test_states_that_come_and_go_are_not_each_written(ctx, monkeypatch):
    monkeypatch.setattr(service, "BEAT_EVERY_S", 60.0)
    monkeypatch.setattr(service, "CHANGE_EVERY_S", 60.0)
    written = []

    async def note(beat: Heartbeat) -> None:
        written.append(beat.state)

    ctx.registry.beat = note
    for _ in range(50):
        await ctx.beat("scoring")
        await ctx.beat("idle")
    assert written == ["scoring"]
    monkeypatch.setattr(service, "CHANGE_EVERY_S", 0.3)

    async def told() -> bool:
        await ctx.beat("idle")
        return written == ["scoring", "idle"]

    await until(told, "the state that lasts is written")


async def test_the_loop_beats_while_it_waits_for_something_it_vouches_for(ctx):
    await ctx.beat("starting engine")
    first = await seen(ctx)
    done = asyncio.Event()
    waiting = asyncio.create_task(ctx.vouch(done.wait()))
    await asyncio.sleep(0.4)  # longer than a computation may take: it has a deadline of its own
    await until(lambda: _changed(ctx, first), "it beats")
    done.set()
    assert await waiting is True


async def _changed(ctx: Context, first: Heartbeat) -> bool:
    return (await seen(ctx)) != first


async def test_a_computation_that_never_ends_falls_silent(ctx):
    beats = []

    async def note(beat: Heartbeat) -> None:
        beats.append(beat)

    ctx.registry.beat = note
    ctx.config.hang_timeout_s = 3600.0
    release, other = threading.Event(), threading.Event()
    work = asyncio.create_task(ctx.compute(release.wait))
    await until(lambda: len(beats) >= 3, "it beats while it computes")
    release.set()
    assert await work is True
    ctx.config.hang_timeout_s = 0.2
    work = asyncio.create_task(ctx.compute(other.wait))
    await asyncio.sleep(0)  # it computes from here on
    began = time.monotonic()
    await until(lambda: time.monotonic() - began > 0.3, "it is taken for hung by now")
    before = len(beats)
    await asyncio.sleep(0.3)
    assert len(beats) == before, "and silent"
    other.set()
    assert await work is True


async def test_cancelling_reaches_what_is_vouched_for(ctx):
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()

    task = asyncio.create_task(ctx.vouch(work()))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_lost_lease_ends_a_vouched_wait(ctx):
    await ctx.beat("training")

    async def lost(_: Heartbeat) -> None:
        raise LeaseLost("trainer", "somebody else")

    ctx.registry.beat = lost
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(ctx.vouch(asyncio.sleep(3600)), 60)


async def test_what_fails_under_a_vouch_fails_here(ctx):
    async def fails() -> None:
        raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk"):
        await ctx.vouch(fails())


async def test_a_heartbeat_that_the_broker_does_not_allow_ends_the_service(ctx):
    """It would be taken for hung otherwise."""

    async def refuse(beat: Heartbeat) -> None:
        raise AccessDenied("nats://broker", "publish", "$KV.run_services.beat.rollout.rollout-0")

    ctx.registry.beat = refuse
    with pytest.raises(AccessDenied, match="beat.rollout"):
        await ctx.beat("starting")
