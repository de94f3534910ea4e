"""Samples of long groups outlive their replica; short groups go in one request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.rollout.draw import Drawer
from services.rollout.engines.client import EngineDead
from services.rollout.episodes import Aborted
from shared import wire
from shared.broker import EmbeddedBroker
from shared.jetstream import Connection
from shared.records import FinishedSample, Group, Sampling
from shared.service import Context
from tests.controller.pipeline import open_context, run_config
from tests.rollout.scripted import Engine, Tokens
from tests.shared.runs import until

PROMPT = [1, 2]


def group(n: int = 4, tokens: int = 1000, seed: int | None = 3, min_step: int = 0) -> Group:
    sampling = Sampling(n=n, max_new_tokens=tokens, seed=seed)
    return Group("0-7.1", "train", 7, 7, min_step, "p", None, {}, sampling)


def delivery(number: int = 1) -> Any:
    return SimpleNamespace(delivered=number)


@pytest.fixture
async def ctx(
    broker: EmbeddedBroker, connect: Callable[..., Awaitable[Connection]], run_name: str, tmp_path: Path
) -> AsyncIterator[Context]:
    config = run_config(run_name, str(tmp_path), rollout={"keep_after_s": 0})
    context = await open_context(await connect(broker.url), config, "rollout", "r0")
    yield context
    await context.queue.close()


def drawer(ctx: Context, engine: Engine, replica: str = "r0") -> Drawer:
    ctx.replica = replica
    return Drawer(ctx, engine, Tokens(), lambda version: version - 1)  # type: ignore[arg-type]


async def stored(ctx: Context) -> dict[int, str]:
    """Index and replica of all finished samples in the stream."""
    records = [wire.decode(data, FinishedSample) async for data, _ in ctx.queue.read("partials")]
    return {record.index: record.replica for record in records}


async def test_short_groups_are_drawn_in_one_request(ctx: Context) -> None:
    engine = Engine()
    samples = await drawer(ctx, engine).draw(group(tokens=100), PROMPT, delivery())
    assert [request["sampling_params"]["n"] for request in engine.requests] == [4]
    assert samples.texts == ["39", "49", "59", "69"]
    assert await stored(ctx) == {}


async def test_long_ones_are_drawn_one_by_one_each_with_a_seed_of_its_own(ctx: Context) -> None:
    engine = Engine()
    mine = drawer(ctx, engine)
    samples = await mine.draw(group(), PROMPT, delivery())
    assert [request["sampling_params"]["n"] for request in engine.requests] == [1] * 4
    assert samples.texts == ["39", "49", "59", "69"]
    assert samples.replicas == []
    assert await stored(ctx) == dict.fromkeys(range(4), "r0")
    await mine.forget(group())
    assert await stored(ctx) == {}
    without = await mine.draw(group(seed=None), PROMPT, delivery())
    assert len(without.texts) == 4
    assert "sampling_seed" not in engine.requests[-1]["sampling_params"]


async def test_what_finishes_soon_is_not_stored(ctx: Context) -> None:
    ctx.config.rollout.keep_after_s = 60
    await drawer(ctx, Engine()).draw(group(), PROMPT, delivery())
    assert await stored(ctx) == {}


async def test_the_next_replica_draws_only_what_is_missing(ctx: Context) -> None:
    first, second = Engine(), Engine(version=2)
    first.hold(1, 3)
    dying = asyncio.create_task(drawer(ctx, first, "r0").draw(group(), PROMPT, delivery()))
    await until(lambda: _are(stored(ctx), {0, 2}), "two of four are finished and stored")
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
    taking_over = drawer(ctx, second, "r1")
    samples = await taking_over.draw(group(), PROMPT, delivery(2))
    assert [request["rid"].rpartition("/")[2] for request in second.requests] == ["1", "3"]
    assert samples.texts == ["39", "49", "59", "69"]
    assert samples.replicas == ["r0", "r1", "r0", "r1"]
    assert samples.span_version.tolist() == [1, 2, 1, 2]
    assert taking_over.counts.kept == 2
    await taking_over.forget(group())
    assert await stored(ctx) == {}


async def test_all_of_them_may_have_been_finished(ctx: Context) -> None:
    """The replica died before it could store the group as a whole."""
    await drawer(ctx, Engine(), "r0").draw(group(), PROMPT, delivery())
    engine = Engine()
    samples = await drawer(ctx, engine, "r1").draw(group(), PROMPT, delivery(2))
    assert engine.requests == []
    assert samples.replicas == ["r0"] * 4


async def test_a_deterministic_run_keeps_only_what_it_would_draw_itself(ctx: Context) -> None:
    ctx.config.deterministic = True
    await drawer(ctx, Engine(version=3), "r0").draw(group(min_step=2), PROMPT, delivery())
    engine = Engine(version=2)
    await drawer(ctx, engine, "r1").draw(group(min_step=1), PROMPT, delivery(2))
    assert len(engine.requests) == 4
    again = await drawer(ctx, Engine(version=3), "r2").draw(group(min_step=2), PROMPT, delivery(3))
    assert again.replicas == ["r0"] * 4


async def test_an_interrupted_sample_continues_from_its_tokens(ctx: Context) -> None:
    """Each token under the version that drew it, in one request or in many."""
    for tokens in (100, 1000):
        engine = Engine(version=4)
        engine.interruptions = 2

        def switch(engine: Engine = engine) -> None:
            engine.version = 5 if len(engine.requests) > 1 else 4

        engine.during = switch
        mine = drawer(ctx, engine)
        samples = await mine.draw(group(n=2, tokens=tokens, seed=None), PROMPT, delivery())
        assert mine.counts.interrupted == 2
        first, *_, last = engine.requests
        assert last["input_ids"][: len(PROMPT)] == PROMPT
        assert len(last["input_ids"]) == len(PROMPT) + 1
        assert last["sampling_params"]["max_new_tokens"] == first["sampling_params"]["max_new_tokens"] - 1
        assert samples.lengths.tolist() == [3, 3]
        assert samples.finish == ["stop", "stop"]
        assert [(one.span_version[0], one.span_version[-1]) for one in samples.split()] == [(4, 5), (4, 5)]
        await mine.forget(group(n=2))


async def test_a_continuation_draws_with_other_numbers(ctx: Context) -> None:
    engine = Engine()
    engine.interruptions = 1
    await drawer(ctx, engine).draw(group(n=1, tokens=100), PROMPT, delivery())
    first, second = (request["sampling_params"]["sampling_seed"] for request in engine.requests)
    assert first != second


async def test_the_next_replica_continues_what_a_stopping_one_had_begun(ctx: Context) -> None:
    engine = Engine()
    engine.interruptions = 4
    stopping = drawer(ctx, engine, "r0")
    stopping.stopping = True
    with pytest.raises(Aborted, match="left to the next replica"):
        await stopping.draw(group(tokens=100), PROMPT, delivery())
    assert await stored(ctx) == dict.fromkeys(range(4), "r0")
    taking_over = drawer(ctx, Engine(version=2), "r1")
    samples = await taking_over.draw(group(tokens=100), PROMPT, delivery(2))
    assert samples.span_version.tolist() == [1, 2] * 4
    assert samples.lengths.tolist() == [3] * 4
    assert taking_over.counts.kept == 4
    finished = [wire.decode(data, FinishedSample) async for data, _ in ctx.queue.read("partials")]
    assert {one.samples.finish[0] for one in finished} == {"stop"}, "a finished sample takes its beginning's place"
    await taking_over.forget(group())
    assert await stored(ctx) == {}


async def test_a_deterministic_run_draws_an_interrupted_sample_again(ctx: Context) -> None:
    ctx.config.deterministic = True
    engine = Engine()
    engine.interruptions = 1
    with pytest.raises(Aborted, match="draws it in one go"):
        await drawer(ctx, engine).draw(group(tokens=100), PROMPT, delivery())


async def test_samples_that_are_cut_off_or_have_no_logprobs_are_counted(ctx: Context) -> None:
    engine = Engine()
    engine.logprob = None
    mine = drawer(ctx, engine)
    samples = await mine.draw(group(n=3, tokens=100), PROMPT, delivery())
    assert mine.counts.nonfinite == 3
    assert mine.counts.truncated == 0
    assert np.isnan(samples.logprobs).all()


async def test_one_that_fails_ends_the_others(ctx: Context) -> None:
    engine = Engine()
    engine.hold(0, 1, 2)

    def die() -> None:
        raise EngineDead(0, "gone")

    engine.during = die
    with pytest.raises(EngineDead):
        await drawer(ctx, engine).draw(group(), PROMPT, delivery())


async def _are(found: Awaitable[dict[int, str]], expected: set[int]) -> bool:
    return set(await found) == expected
