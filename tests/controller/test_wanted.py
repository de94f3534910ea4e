"""What replicas look at: it follows the record, whoever dies or comes late."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.controller.scaling.scaler import Scaler
from shared import wanted, wire
from shared.broker import EmbeddedBroker
from shared.jetstream import Connection
from shared.service import Context
from shared.wanted import Leaving, Wanted
from tests.controller.pipeline import open_context, run_config


@pytest.fixture
async def ctx(
    broker: EmbeddedBroker, connect: Callable[..., Awaitable[Connection]], run_name: str, tmp_path: Path
) -> Context:
    return await open_context(await connect(broker.url), run_config(run_name, str(tmp_path)), "controller", "c")


def asked(*names: str) -> Callable[[Wanted], Wanted]:
    return lambda record: replace(record, leaving=list(names))


async def test_who_is_asked_to_leave_sees_it_and_nobody_else(ctx: Context):
    assert not await wanted.leaves(ctx.kv, "rollout-1")
    await wanted.change(ctx.kv, asked("rollout-1"))
    assert await wanted.leaves(ctx.kv, "rollout-1")
    assert not await wanted.leaves(ctx.kv, "rollout-0")
    await wanted.change(ctx.kv, asked())
    assert not await wanted.leaves(ctx.kv, "rollout-1")


async def test_a_writer_that_died_after_the_record_is_made_good_by_the_next(ctx: Context):
    await wanted.change(ctx.kv, asked())
    await ctx.kv.put(wanted.KEY, wire.encode(Wanted(leaving=["rollout-1"])))
    assert not await wanted.leaves(ctx.kv, "rollout-1")
    await wanted.change(ctx.kv, lambda record: record)
    assert await wanted.leaves(ctx.kv, "rollout-1")


async def test_a_writer_that_comes_late_changes_nothing(ctx: Context):
    await wanted.change(ctx.kv, asked("rollout-1"))
    entry = await ctx.kv.get(wanted.KEY)
    assert entry is not None
    await wanted.change(ctx.kv, asked())
    await wanted._tell(ctx.kv, Leaving(entry[1], ["rollout-1"]))
    assert not await wanted.leaves(ctx.kv, "rollout-1")


async def test_a_controller_tidies_up_what_the_last_one_left(ctx: Context):
    await Scaler(ctx).tick()
    assert await ctx.kv.get(wanted.KEY) is None, "where nobody launches there is no record"
    spec = {"service": "rollout", "by": "", "engine_url": ""}
    await wanted.change(ctx.kv, lambda _: Wanted({"rollout-0": spec}, ["rollout-1"], ["rollout-1"]))
    await Scaler(ctx).tick()
    assert wanted.load(await ctx.kv.get(wanted.KEY)) == Wanted({"rollout-0": spec})
    assert not await wanted.leaves(ctx.kv, "rollout-1")
