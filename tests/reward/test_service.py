"""The reward service on a real broker: scores, fates, dead letters, and SIGKILL in mid-stream."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.reward.main import main
from shared import wire
from shared.broker import EmbeddedBroker
from shared.config import ConfigError, RunConfig, parse
from shared.jetstream import Connection
from shared.records import DeadLetter, Event, Group, Metric, Receipt, Samples, Sampling, floats, ints
from shared.service import Context
from tests.controller.pipeline import open_context
from tests.shared.runs import until

ROOT = str(Path(__file__).parents[2])
Connect = Callable[..., Awaitable[Connection]]


def run_config(run: str, functions: list[dict[str, Any]], redeliver_after_s: float, **reward: Any) -> RunConfig:
    data: dict[str, Any] = {"run": run, "steps": 9, "groups_per_step": 50, "samples_per_group": 2, "base": ROOT}
    data |= {"model": {"path": "m"}, "prompts": {"source": "a.b"}, "drain_timeout_s": 1.0}
    data |= {"redeliver_after_s": redeliver_after_s}
    return parse(data | {"reward": {"functions": functions, "timeout_s": 60.0} | reward}, "test")


def functions(*names: str) -> list[dict[str, Any]]:
    return [{"path": f"tests.reward.functions.{name}"} for name in names]


def group(issue: int, *texts: str, answer: Any = "a", kind: str = "train", finish: str = "stop") -> Group:
    """As a rollout would hand it on: a sample's tokens are as many as its letters."""
    lengths = [len(text) for text in texts]
    count, total = len(texts), sum(lengths)
    samples = Samples(
        lengths=ints(lengths),
        ids=ints(range(total)),
        logprobs=floats([-1.0] * total),
        mask=np.ones(total, dtype="|u1"),
        finish=[finish] * count,
        texts=list(texts),
        span_sample=ints(range(count)),
        span_start=ints([0] * count),
        span_end=ints(lengths),
        span_version=ints([4] * count),
        span_step=ints(range(3, 3 + count)),
    )
    name = f"0-{issue}" if kind == "train" else f"eval-0-{issue}"
    issue = issue if kind == "train" else -1
    sampling = Sampling(count, 8)
    return Group(name, kind, issue, issue, 0, "p", answer, {}, sampling, ints([1]), samples=samples, replica="r0")  # type: ignore[arg-type]


class Bench:
    """A run whose reward requests a test writes and whose results it reads."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx

    async def request(self, *groups: Group) -> None:
        await self.ctx.queue.publish_all([(self.ctx.subjects.reward_requests, one, one.id) for one in groups])

    async def records(self, stream: str, kind: type[Any]) -> list[Any]:
        return [wire.decode(message, kind) async for message, _ in self.ctx.queue.read(stream)]

    async def trained(self, count: int) -> list[Group]:
        """What the trainer would get."""
        puller = await self.ctx.queue.pull("advantages", "trainer", prefetch=8)
        found = []
        while len(found) < count:
            delivery = await puller.next(120)
            assert delivery is not None, f"{len(found)} of {count} groups came"
            found.append(wire.decode(delivery.data, Group))
            await delivery.ack()
        assert await puller.next(0.2) is None, "nothing more"
        await puller.stop()
        return found

    async def receipts(self, count: int) -> dict[str, Receipt]:
        async def enough() -> bool:
            return len(await self.records("receipts", Receipt)) >= count

        await until(enough, f"{count} receipts", 120)
        return {receipt.group_id: receipt for receipt in await self.records("receipts", Receipt)}


@asynccontextmanager
async def serving(ctx: Context) -> AsyncIterator[None]:
    task = asyncio.create_task(main(ctx))
    try:
        yield
        if task.done():
            task.result()
    finally:
        ctx.stopping.set()
        await asyncio.wait_for(task, 120)


@pytest.fixture
def bench(broker: EmbeddedBroker, connect: Connect, run_name: str) -> Callable[..., Awaitable[Bench]]:
    async def open_one(entries: list[dict[str, Any]], redeliver_after_s: float = 60.0, **reward: Any) -> Bench:
        config = run_config(run_name, entries, redeliver_after_s, **reward)
        return Bench(await open_context(await connect(broker.url), config, "reward", "w0"))

    return open_one


async def test_scores_advantages_and_fates(bench: Callable[..., Awaitable[Bench]]) -> None:
    entries = [{"path": "tests.reward.functions.right", "weight": 2.0}, {"path": "tests.reward.functions.acts"}]
    one = await bench(entries, filters=["unscorable", "zero_variance"], workers=2)
    async with serving(one.ctx):
        await one.request(
            group(0, "int", "numpy", "nan", answer="int"),
            group(1, "int", "int"),
            group(2, "none", "raise"),
            group(0, "int", "bool", "text", kind="eval"),
        )
        (found,) = await one.trained(1)
        receipts = await one.receipts(3)
    assert found.id == "0-0"
    assert found.rewards is not None
    np.testing.assert_array_equal(found.rewards.total, floats([4.0, 0.5, np.nan]))
    assert set(found.rewards.parts) == {"right", "acts"}
    assert "acts: returned nan" in found.rewards.errors[2]
    np.testing.assert_allclose(found.advantages, [0.5**0.5, -(0.5**0.5), 0.0], atol=1e-3)  # type: ignore[arg-type]
    assert found.times.keys() >= {"scored", "advantages"}
    assert (receipts["0-1"].kind, receipts["0-1"].reason, receipts["0-1"].issue) == ("dropped", "zero_variance", 1)
    assert (receipts["0-2"].reason, receipts["0-2"].reward) == ("unscorable", None)
    evaluated = receipts["eval-0-0"]
    assert (evaluated.kind, evaluated.reward, evaluated.tokens) == ("evaluated", 1.5, 11)
    assert evaluated.sample_steps is not None
    assert evaluated.sample_steps.tolist() == [3, 4, 5]
    trajectories = await one.records("trajectories", Group)
    assert sorted(t.id for t in trajectories) == ["0-0", "0-1", "0-2", "eval-0-0"]
    events = await one.records("events", Event)
    assert {event.detail["reason"] for event in events if event.kind == "dropped"} == {"zero_variance", "unscorable"}
    assert {event.detail["error"] for event in events if event.kind == "reward_error"} == {
        "not_finite",
        "not_a_number",
        "raised",
    }
    await one.ctx.queue.close()
    metrics = await one.records("metrics", Metric)
    assert metrics[-1].values["samples_total"] == 10
    assert metrics[-1].values["errors_total.not_a_number"] == 2
    assert metrics[-1].values["busy_s"] > 0


async def test_user_code_at_its_worst_does_not_stop_the_others(bench: Callable[..., Awaitable[Bench]]) -> None:
    one = await bench(functions("acts"), workers=2, filters=["unscorable"], timeout_s=3.0)
    bad = [
        group(i, *texts)
        for i, texts in enumerate([("sleep", "int"), ("kill", "kill"), ("spin", "bool"), ("exit", "nan")])
    ]
    async with serving(one.ctx):
        await one.request(*bad, *(group(i, "int", "bool") for i in range(4, 20)))
        found = {one.id: one for one in await one.trained(18)}
        receipts = await one.receipts(2)
    assert {f"0-{i}" for i in (0, 2, *range(4, 20))} == set(found)
    assert {name: receipt.reason for name, receipt in receipts.items()} == {"0-1": "unscorable", "0-3": "unscorable"}
    slow = found["0-0"].rewards
    assert slow is not None
    assert np.isnan(slow.total[0])
    assert slow.total[1] == 2
    assert found["0-0"].advantages is not None
    assert found["0-0"].advantages.tolist() == [0, 0]


async def test_messages_that_nobody_can_read_go_to_the_dead_letters(bench: Callable[..., Awaitable[Bench]]) -> None:
    one = await bench(functions("right"))
    aborted, fine, bare = group(1, "a", "b", finish="abort"), group(2, "a", "b"), group(3, "a")
    bare.samples = None
    publish, subject = one.ctx.queue.publish, one.ctx.subjects.reward_requests
    await publish(subject, b"not msgpack at all", msg_id="0-0")
    await publish(subject, wire.encode(fine)[:-20], msg_id="0-9")
    await publish(one.ctx.subjects.trajectory("0-8"), group(8, "a"), msg_id="0-8")
    async with serving(one.ctx):
        await one.request(aborted, fine, bare)
        assert [group.id for group in await one.trained(1)] == ["0-2"]
        receipts = await one.receipts(5)
    reasons = {f"0-{i}": "dead:reward" for i in (0, 1, 3, 9)} | {"0-8": "dead:advantages"}
    assert {name: receipt.reason for name, receipt in receipts.items()} == reasons
    letters = {letter.group_id: letter.reason for letter in await one.records("dead", DeadLetter)}
    assert "not a message of this system" in letters["0-0"]
    assert "aborted sample" in letters["0-1"]
    assert "group.samples: missing" in letters["0-3"]
    assert "group.rewards: missing" in letters["0-8"]


async def test_functions_that_cannot_be_used_are_a_fault_of_the_config(bench: Callable[..., Awaitable[Bench]]) -> None:
    one = await bench(functions("wants_more"))
    with pytest.raises(ConfigError, match=r"reward\.functions\[0\].*asks for 'tools'"):
        await main(one.ctx)


async def test_told_to_stop_it_gives_back_what_it_cannot_finish(bench: Callable[..., Awaitable[Bench]]) -> None:
    one = await bench(functions("acts"), timeout_s=600.0)
    async with serving(one.ctx):
        await one.request(group(0, "sleep", "int"))

        async def scoring() -> bool:
            return any(beat.state == "scoring" for beat in await one.ctx.registry.alive("reward"))

        await until(scoring, "scoring has begun", 120)
    puller = await one.ctx.queue.pull("rewards", "reward", prefetch=1)
    delivery = await puller.next(60)
    assert delivery is not None
    assert delivery.msg_id == "0-0"
    await delivery.ack()
    await puller.stop()


async def test_sigkill_in_mid_stream_loses_nothing(
    broker: EmbeddedBroker, bench: Callable[..., Awaitable[Bench]], run_name: str
) -> None:
    """Two lives that end in the middle, and a third: each group has one outcome, and comes once."""
    scored = functions("pid", "right")
    one = await bench(scored, redeliver_after_s=1.0, filters=["zero_variance"], workers=2, max_deliveries=20)
    await one.ctx.kv.put("state", b"running")
    command = [sys.executable, "-m", "services.controller.cli", "serve", "reward", "--nats", broker.url]
    groups = [group(i, "a", "b" if i % 3 else "a") for i in range(150)]
    outcome = asyncio.create_task(one.trained(100))
    await one.request(*groups)
    for life in range(2):
        process = await asyncio.create_subprocess_exec(*command, "--run", run_name, "--replica", f"w{life}")

        async def reached(goal: int = 40 * (life + 1)) -> bool:
            return (await one.ctx.queue.depths())["trajectories"].messages >= goal

        try:
            await until(reached, "more scored groups", 120)
        finally:
            process.send_signal(signal.SIGKILL)
            await process.wait()
    async with serving(one.ctx):
        found = await asyncio.wait_for(outcome, 120)
        receipts = await one.receipts(50)
    assert sorted(group.id for group in found) == sorted(f"0-{i}" for i in range(150) if i % 3)
    assert set(receipts) == {f"0-{i}" for i in range(0, 150, 3)}
    assert {receipt.kind for receipt in receipts.values()} == {"dropped"}
    assert len(await one.records("trajectories", Group)) == 150
