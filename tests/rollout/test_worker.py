"""One group in a worker's hands, with a real broker: exact weights in deterministic runs, and second deliveries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.rollout.caution import Caution
from services.rollout.main import Worker
from shared import wire
from shared.broker import EmbeddedBroker
from shared.jetstream import Connection
from shared.pull import Delivery, Puller
from shared.records import Group, Sampling
from tests.controller.pipeline import open_context, run_config
from tests.rollout.scripted import Engine, Receiver, Tokens
from tests.shared.runs import until


class Bench:
    """A worker without its loop."""

    def __init__(self, ctx: Any, puller: Puller, requests: Puller) -> None:
        self.ctx, self.puller, self.requests = ctx, puller, requests
        self.engine, self.receiver = Engine(), Receiver()
        self.worker = Worker(ctx, self.engine, self.receiver, Tokens(), Caution(4, 5))  # type: ignore[arg-type]

    def weights(self, step: int) -> None:
        self.receiver.step, self.engine.version = step, step + 1

    async def take(self, min_step: int, issue: int = 0, msg_id: str | None = None) -> asyncio.Task[None]:
        """Hand a prompt to the worker."""
        one = Group(f"0-{issue}", "train", issue, issue, min_step, "p", None, {}, Sampling(2, 8, seed=1))
        await self.ctx.queue.publish(self.ctx.subjects.prompts, one, msg_id=msg_id or one.id)
        delivery = await self.puller.next(60)
        assert delivery is not None
        return asyncio.create_task(self._episode(delivery))

    async def _episode(self, delivery: Delivery) -> None:
        async with self.worker.caution.place() as place:
            await self.worker._take(delivery, place)

    async def made(self) -> list[Group]:
        """The reward requests so far."""
        found = []
        for _ in range((await self.ctx.queue.depths())["rewards"].messages):
            delivery = await self.requests.next(60)
            assert delivery is not None
            found.append(wire.decode(delivery.data, Group))
            await delivery.ack()
        return found

    async def prompts(self) -> int:
        return (await self.ctx.queue.depths())["prompts"].messages


@pytest.fixture
async def bench(
    broker: EmbeddedBroker, connect: Callable[..., Awaitable[Connection]], run_name: str, tmp_path: Path
) -> AsyncIterator[Bench]:
    config = run_config(run_name, str(tmp_path), deterministic=True)
    ctx = await open_context(await connect(broker.url), config, "rollout", "r0")
    puller = await ctx.queue.pull("prompts", "rollout", prefetch=0)
    requests = await ctx.queue.pull("rewards", "reward", prefetch=0)
    yield Bench(ctx, puller, requests)
    await ctx.queue.close()


async def test_a_group_is_drawn_under_exactly_the_weights_of_its_round(bench: Bench) -> None:
    working = await bench.take(min_step=2)
    for step in (0, 1, 2):
        assert not bench.engine.requests
        bench.weights(step)
        await asyncio.sleep(0.05)
    await working
    (group,) = await bench.made()
    assert group.samples is not None
    assert group.samples.span_step.tolist() == [2, 2]
    assert await bench.prompts() == 0


async def test_what_a_switch_interrupts_is_drawn_again_when_its_weights_are_back(bench: Bench) -> None:
    """The trainer went back to step 1 while a group of round 2 was being drawn, and came to step 2 again."""
    bench.weights(2)

    def roll_back() -> None:
        bench.engine.during = lambda: None
        bench.receiver.step, bench.engine.version = 1, 7

    bench.engine.during = roll_back
    working = await bench.take(min_step=2)
    await until(lambda: bench.receiver.step == 1, "the switch comes while it draws")
    await asyncio.sleep(0.1)
    assert not working.done()
    bench.weights(2)
    await working
    (group,) = await bench.made()
    assert group.samples is not None
    assert group.samples.drawn_under(2)
    assert len(bench.engine.requests) == 2


async def test_a_prompt_whose_round_is_over_was_drawn_before(bench: Bench) -> None:
    bench.weights(3)
    await (await bench.take(min_step=2))
    assert bench.engine.requests == []
    assert await bench.made() == []
    assert await bench.prompts() == 0


async def test_otherwise_newer_weights_will_do(bench: Bench) -> None:
    bench.ctx.config.deterministic = False
    bench.weights(3)
    await (await bench.take(min_step=2))
    (group,) = await bench.made()
    assert group.samples is not None
    assert group.samples.span_step.tolist() == [3, 3]


async def test_a_second_delivery_leaves_one_request(bench: Bench) -> None:
    bench.ctx.config.deterministic = False
    for msg_id in ("0-0", "as if the broker had forgotten the first"):
        await (await bench.take(min_step=0, msg_id=msg_id))
    assert [group.id for group in await bench.made()] == ["0-0"]


async def test_a_slot_ends_with_its_puller(bench: Bench) -> None:
    """Another slot failed: those that wait for prompts must not keep the replica from leaving."""
    slot = asyncio.create_task(bench.worker._slot(bench.puller))
    await until(lambda: bench.worker.caution.held == 1, "it asks for a prompt")
    await bench.puller.stop()
    await asyncio.wait_for(slot, 60)
    assert bench.worker.caution.held == 0
