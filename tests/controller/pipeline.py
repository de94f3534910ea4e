"""Everybody but the controller, in a few lines: takes prompts off the broker, drops some, trains the rest in issue order."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator
from typing import Any

from services.trainer.window import Window
from shared import wire
from shared.config import RunConfig, parse
from shared.jetstream import Connection
from shared.kv import KV
from shared.ledger import Ledger
from shared.records import Group, Receipt, ints
from shared.registry import Registry
from shared.service import Context
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue

MODULE = "slipstream_test_prompts"


def run_config(run: str, base: str, **changes: Any) -> RunConfig:
    """A run of prompts `p0`, `p1`, ... made by a function that `write_prompts` put into `base`."""
    data: dict[str, Any] = {"run": run, "steps": 6, "groups_per_step": 3, "samples_per_group": 2, "base": base}
    data |= {"model": {"path": "m"}, "reward": {"functions": [{"path": "a.b"}]}, "workdir": base}
    data |= {"prompts": {"source": f"{MODULE}.prompts", "size": 8}}
    return parse(data | changes, "test")


def write_prompts(base: Any) -> None:
    (base / f"{MODULE}.py").write_text(
        "def prompts(seed, index):\n    return {'prompt': f'p{index}', 'answer': index}\n"
    )


async def open_context(connection: Connection, config: RunConfig, service: str, replica: str) -> Context:
    """What run_service would hand to `service`."""
    subjects = Subjects(config.run)
    kv = await KV.open(connection, subjects.config_bucket)
    await kv.put("config", config.dump())
    queue = TransferQueue(connection, subjects)
    await queue.ensure_streams(config)
    registry = await Registry.open(connection, subjects, ttl_s=config.heartbeat_ttl_s)
    return Context(service, replica, config, connection, queue, kv, registry)


class Pipeline:
    """Rollout, reward and trainer in one. `drops` is the share of groups that a filter takes."""

    def __init__(self, ctx: Context, drops: float = 0.0, eval_reward: float | None = 1.0) -> None:
        self.ctx, self.drops, self.eval_reward = ctx, drops, eval_reward
        self.window: Window[Group] = Window(ctx.config.window)
        self.step, self.batch = 0, list[Group]()
        self.seen: list[Group] = []
        self.late = list[Group]()

    async def run(self) -> None:
        puller = await self.ctx.queue.pull("prompts", "rollout", prefetch=4)
        try:
            while True:
                delivery = await puller.next(1.0)
                if delivery is not None:
                    await self.take(wire.decode(delivery.data, Group))
                    await delivery.ack()
        finally:
            await puller.stop()

    async def take(self, group: Group) -> None:
        self.seen.append(group)
        if group.kind == "eval":
            receipt = Receipt("evaluated", group.id, reward=self.eval_reward, sample_steps=ints([self.step]))
            await self.tell(receipt)
        elif group.min_step > self.step:
            self.late.append(group)
        elif zlib.crc32(group.id.encode()) % 1000 < 1000 * self.drops:
            self.window.drop(group.issue)
            await self.tell(self.receipt("dropped", group, reason="zero_variance", reward=0.0))
        else:
            self.window.offer(group.issue, group)
        await self.train()

    async def train(self) -> None:
        size = self.ctx.config.groups_per_step
        self.batch += [group for _, group in self.window.take(size - len(self.batch))]
        if len(self.batch) == size:
            for group in self.batch:
                await self.tell(self.receipt("trained", group, step=self.step, reward=0.5))
            self.step, self.batch = self.step + 1, []
            late, self.late = self.late, []
            for group in late:
                await self.take(group)

    def receipt(self, kind: Any, group: Group, **more: Any) -> Receipt:
        drawn = ints([self.step] * group.sampling.n)
        return Receipt(kind, group.id, group.issue, group.seat, group.min_step, sample_steps=drawn, **more)

    async def tell(self, receipt: Receipt) -> None:
        await self.ctx.queue.publish(self.ctx.subjects.receipts, receipt, msg_id=f"{receipt.kind}:{receipt.group_id}")


@contextlib.asynccontextmanager
async def running(pipeline: Pipeline) -> AsyncIterator[None]:
    task = asyncio.create_task(pipeline.run())
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def fold(ctx: Context) -> Ledger:
    """The ledger as anybody would read it."""
    ledger = Ledger()
    async for message, _ in ctx.queue.read("receipts"):
        ledger.apply(wire.decode(message, Receipt))
    return ledger
