"""The controller on a real broker: whole runs, evaluation, refusals, and SIGKILL in mid-stream."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.controller.dispatch import CURSOR_KEY, Cursor
from services.controller.main import main
from shared import wire
from shared.broker import EmbeddedBroker
from shared.config import ConfigError
from shared.errors import AlreadyActive
from shared.jetstream import Connection
from shared.ledger import Ledger
from shared.pull import Puller
from shared.records import Event, Group, Metric, Receipt
from shared.service import Context, ServiceFailed
from tests.controller.pipeline import Pipeline, fold, open_context, run_config, running, write_prompts
from tests.shared.runs import until

Connect = Callable[..., Awaitable[Connection]]
Opener = Callable[..., Awaitable[Context]]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    write_prompts(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "slipstream_test_prompts", raising=False)
    return str(tmp_path)


@pytest.fixture
def opener(broker: EmbeddedBroker, connect: Connect, base: str, run_name: str) -> Opener:
    async def open_one(service: str = "controller", replica: str = "c0", **changes: Any) -> Context:
        return await open_context(await connect(broker.url), run_config(run_name, base, **changes), service, replica)

    return open_one


def check_whole(ledger: Ledger, ctx: Context) -> None:
    config = ctx.config
    assert ledger.balanced
    assert ledger.pending == 0
    assert ledger.trained == config.steps * config.groups_per_step


async def records(ctx: Context, stream: str, kind: type[Any]) -> list[Any]:
    return [wire.decode(message, kind) async for message, _ in ctx.queue.read(stream)]


async def test_a_whole_run_with_filters_and_evaluations(opener: Opener) -> None:
    held_out = {"prompts": {"source": "slipstream_test_prompts.prompts", "size": 2}, "every": 4}
    ctx = await opener(max_staleness=1, window=2, eval=held_out)
    pipeline = Pipeline(await opener("rollout", "r0", max_staleness=1, window=2, eval=held_out), drops=0.4)
    async with running(pipeline):
        await asyncio.wait_for(main(ctx), 120)
    ledger = await fold(ctx)
    check_whole(ledger, ctx)
    assert ledger.dropped["zero_variance"] > 3
    assert not pipeline.late, "everything that was issued could start under the newest weights"
    evals = [group.id for group in pipeline.seen if group.kind == "eval"]
    assert evals == ["eval-0-0", "eval-0-1", "eval-4-0", "eval-4-1", "eval-6-0", "eval-6-1"]
    assert await ctx.kv.get("state") is not None
    assert (await ctx.kv.get("state"))[0] == b"finished"  # type: ignore[index]
    told = [event.message for event in await records(ctx, "events", Event) if event.kind == "evaluated"]
    assert told == [f"step {step}: reward 1.0000 over 2 prompts" for step in (0, 4, 6)]
    values: dict[int | None, dict[str, float]] = {}

    async def all_emitted() -> bool:
        values.update({m.step: m.values for m in await records(ctx, "metrics", Metric) if "pending" in m.values})
        return len(values) >= 6

    await until(all_emitted, "the metrics of all steps, whose emission nobody waits for, are stored")
    assert sorted(values) == [1, 2, 3, 4, 5, 6]
    assert values[6]["reward"] == 0.5
    assert values[6]["reward_scored"] <= 0.5
    assert values[6]["staleness_max"] == 0
    first = next(group for group in pipeline.seen if group.kind == "train")
    assert (first.id, first.issue, first.seat, first.min_step) == ("0-0", 0, 0, 0)
    assert first.sampling.n == 2
    assert sorted({group.answer for group in pipeline.seen if group.id.startswith("0-")}) == list(range(8))


async def test_weak_start_is_refused(opener: Opener) -> None:
    held_out = {"prompts": {"source": "slipstream_test_prompts.prompts", "size": 2}, "min_reward": 0.2}
    ctx = await opener(eval=held_out)
    async with running(Pipeline(ctx, eval_reward=0.1)):
        with pytest.raises(ServiceFailed, match=r"eval\.min_reward: the policy starts with a reward of 0\.1"):
            await asyncio.wait_for(main(ctx), 120)
    assert (await ctx.kv.get("state"))[0].startswith(b"failed:eval.min_reward")  # type: ignore[index]
    assert (await fold(ctx)).issued == 0


async def test_a_batch_that_never_fills_fails_the_run(opener: Opener) -> None:
    ctx = await opener(groups_per_step=1, max_staleness=0)
    async with running(Pipeline(ctx, drops=1.0)):
        with pytest.raises(ServiceFailed, match="20 groups in a row were dropped and not one survived"):
            await asyncio.wait_for(main(ctx), 120)
    assert (await ctx.kv.get("state"))[0].startswith(b"failed:20 groups in a row")  # type: ignore[index]


async def test_one_is_active_and_a_taken_port_is_told(opener: Opener) -> None:
    ctx = await opener()
    task = asyncio.create_task(main(ctx))
    status: dict[str, Any] = {}

    async def sent() -> bool:
        status.update(await answer(ctx, "/status"))
        return status["queues"]["prompts"]["messages"] == 6

    await until(sent, "all prompts are sent")
    assert status["slots"] == status["in_flight"] == 6
    assert status["step"] == 0
    assert [replica["service"] for replica in status["replicas"]] == ["controller"]
    assert (await answer(ctx, "/health"))["ok"]
    with pytest.raises(AlreadyActive):
        await main(await opener(replica="c1"))
    ctx.stopping.set()
    await asyncio.wait_for(task, 60)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"controller\.host, controller\.port: cannot listen on 127\.0\.0\.1:{port}"
        ):
            await main(await opener(replica="c2", controller={"port": port}))


async def answer(ctx: Context, path: str) -> dict[str, Any]:
    async def url() -> str:
        return next((beat.detail.get("url", "") for beat in await ctx.registry.alive("controller")), "")

    await until(url, "a controller with a URL")
    async with httpx.AsyncClient() as client:
        return (await client.get(await url() + path, timeout=60)).json()


async def test_seen_from_outside_the_api_asks_for_the_token(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = {"host": "0.0.0.0"}
    with pytest.raises(ConfigError, match=r"controller\.host: 0\.0\.0\.0 .* needs a token"):
        await main(await opener(controller=everywhere))
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "right")
    ctx = await opener(replica="c1", controller=everywhere)
    task = asyncio.create_task(main(ctx))
    assert "asks for a token" in (await answer(ctx, "/status"))["detail"]
    assert (await answer(ctx, "/health"))["ok"]
    ctx.stopping.set()
    await asyncio.wait_for(task, 60)


async def test_what_the_cursor_does_not_cover_is_sent_again(opener: Opener) -> None:
    """As after a death between the receipts and the prompts, and one between the prompts and the cursor."""
    ctx = await opener(max_staleness=0)
    for issue in range(3):
        receipt = Receipt("issued", f"0-{issue}", issue, issue, 0)
        await ctx.queue.publish(ctx.subjects.receipts, receipt, msg_id=f"issued:0-{issue}")
    await ctx.kv.put(CURSOR_KEY, wire.encode(Cursor(sent=1)))
    task = asyncio.create_task(main(ctx))
    puller = await ctx.queue.pull("prompts", "rollout", prefetch=4)
    found = []
    for _ in range(2):
        delivery = await puller.next(60)
        assert delivery is not None
        found.append(wire.decode(delivery.data, Group))
        await delivery.ack()
    assert [group.id for group in found] == ["0-1", "0-2"]
    assert await puller.next(0.5) is None, "all three slots are taken"
    ctx.stopping.set()
    await asyncio.wait_for(task, 60)
    await puller.stop()


async def test_after_a_break_in_its_lease_it_reads_before_it_issues(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another controller was active meanwhile, and died before it sent its prompts. Its receipts come late here."""
    ctx = await opener(max_staleness=0)
    others, asked, held = asyncio.Event(), asyncio.Event(), True

    async def slow(ctx: Context, start: int, news: asyncio.Queue[tuple[bytes, int]]) -> None:
        async for message, seq in ctx.queue.read("receipts", start_seq=start, live=True):
            if wire.decode(message, Receipt).group_id in ("0-3", "0-4"):
                await others.wait()
            await news.put((message, seq))

    async def assure(service: str) -> bool:
        if not held:
            asked.set()
        return held

    monkeypatch.setattr("services.controller.main.follow_receipts", slow)
    monkeypatch.setattr(ctx.registry, "assure", assure)
    task = asyncio.create_task(main(ctx))
    puller = await ctx.queue.pull("prompts", "rollout", prefetch=4)
    await take_prompts(puller, ["0-0", "0-1", "0-2"])
    held = False
    for issue in range(3):
        receipt = Receipt("trained", f"0-{issue}", issue, issue, 0, step=0)
        await ctx.queue.publish(ctx.subjects.receipts, receipt, msg_id=f"trained:0-{issue}")
    for issue in (3, 4):
        receipt = Receipt("issued", f"0-{issue}", issue, issue, 1)
        await ctx.queue.publish(ctx.subjects.receipts, receipt, msg_id=f"issued:0-{issue}")
    await asyncio.wait_for(asked.wait(), 60)
    held = True
    assert await puller.next(1.0) is None, "it knows that it may be behind"
    others.set()
    await take_prompts(puller, ["0-3", "0-4", "0-5"])
    ctx.stopping.set()
    await asyncio.wait_for(task, 60)
    await puller.stop()


async def take_prompts(puller: Puller, expected: list[str]) -> None:
    for group_id in expected:
        delivery = await puller.next(60)
        assert delivery is not None
        assert wire.decode(delivery.data, Group).id == group_id
        await delivery.ack()


async def test_sigkill_in_mid_stream(broker: EmbeddedBroker, opener: Opener, run_name: str) -> None:
    """Killed four times at arbitrary moments, the controller leaves a ledger without hole or double, and the run ends."""
    changes: dict[str, Any] = {"steps": 150, "groups_per_step": 4, "max_staleness": 1, "window": 3}
    changes |= {"eval": {"prompts": {"source": "slipstream_test_prompts.prompts", "size": 3}, "every": 50}}
    ctx = await opener("rollout", "r0", **changes)
    await ctx.kv.put("state", b"running")
    pipeline = Pipeline(ctx, drops=0.3)
    command = [sys.executable, "-m", "services.controller.cli", "serve", "controller", "--nats", broker.url]
    command += ["--run", run_name]
    async with running(pipeline):
        for life in range(5):
            goal = min(150, 30 * (life + 1))
            process = await asyncio.create_subprocess_exec(*command, "--replica", f"c{life}")
            try:
                await until(lambda goal=goal: pipeline.step >= goal, f"step {goal}", 300)
                if life < 4:
                    process.send_signal(signal.SIGKILL)
                assert await asyncio.wait_for(process.wait(), 120) == (0 if life == 4 else -signal.SIGKILL)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
    ledger = await fold(ctx)
    check_whole(ledger, ctx)
    assert not pipeline.late
    assert sorted(entry.issue for entry in ledger.entries.values()) == list(range(ledger.issued))
    evals = [group.id for group in pipeline.seen if group.kind == "eval"]
    assert evals == [f"eval-{step}-{index}" for step in (0, 50, 100, 150) for index in range(3)]


async def test_it_rides_out_a_broker_that_dies(
    own_broker: EmbeddedBroker, connect: Connect, base: str, run_name: str
) -> None:
    config = run_config(run_name, base, steps=60)
    ctx = await open_context(await connect(own_broker.url), config, "controller", "c0")
    pipeline = Pipeline(await open_context(await connect(own_broker.url), config, "rollout", "r0"), drops=0.2)
    async with running(pipeline):
        task = asyncio.create_task(main(ctx))
        for goal in (10, 30):
            await until(lambda goal=goal: pipeline.step >= goal, f"step {goal}")
            own_broker.kill()
            await asyncio.to_thread(own_broker.restart)
        await asyncio.wait_for(task, 120)
    check_whole(await fold(ctx), ctx)
