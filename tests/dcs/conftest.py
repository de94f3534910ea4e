"""A run with a DCS, publishers and receivers in the test's own process; engines are processes that may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from services.dcs.client import DcsClient
from services.dcs.main import main as dcs_main
from services.dcs.snapshots import Manifest
from services.rollout.weights import Start, WeightReceiver
from services.trainer.snapshot_files import NewSnapshot, write_shards
from services.trainer.stage import StageAddress
from services.trainer.weight_copy import Copy
from services.trainer.weights import WeightPublisher
from shared.broker import EmbeddedBroker
from shared.config import RunConfig
from shared.jetstream import Connection
from shared.kv import KV
from shared.records import Announcement, Event, Received
from shared.registry import Registry
from shared.service import Context
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue
from shared.wire import decode
from tests.dcs.fake_engine import PROCESSES, FakeEngine
from tests.shared.runs import make_config, until

torch.set_num_threads(1)

Weights = dict[str, torch.Tensor]


def weights(value: float, size: int = 1000, dtype: torch.dtype = torch.float32) -> Weights:
    """Made-up weights in which every number tells the version; a bfloat16 tensor and a scalar among them."""
    return {
        "embed": torch.full((size, 7), value, dtype=dtype),
        "layer.norm": torch.full((5,), value, dtype=torch.bfloat16),
        "layer.proj": torch.arange(float(size)).reshape(-1, 10) + value,
        "scale": torch.tensor(value),
    }


def stored(copy: Copy, root: Path, model_dir: Path, *, version: int, step: int) -> Manifest:
    """The copy as the snapshot of a version."""
    new = NewSnapshot(root, [copy.outline], version=version, step=step, owner="test")
    return new.complete(model_dir, write_shards(copy, new.folder, new.shards[0]))


@dataclass
class Replica:
    """A rollout replica without its prompts: a receiver, its engine, and the loop that beats."""

    ctx: Context
    receiver: WeightReceiver
    engine: Any
    start: Start
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def holds(self, version: int, deadline_s: float = 60.0) -> None:
        """It serves this version or a later one, and has said so."""

        def serves() -> bool:
            for task in self.tasks:
                if task.done():
                    task.result()
            return self.receiver.version >= version

        await until(serves, f"{self.ctx.replica} holds {version}", deadline_s)
        await until(self._answered, f"{self.ctx.replica} said so", deadline_s)

    async def _answered(self) -> bool:
        found = self.ctx.queue.read("weights", subject=self.ctx.subjects.received)
        records = [decode(data, Received) async for data, _ in found]
        verified = [record.version for record in records if record.ok and record.replica == self.ctx.replica]
        return max(verified, default=0) == self.receiver.version

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.ctx.close()


class World:
    """One run on the session's broker."""

    def __init__(self, url: str, run: str, folder: Path, stack: contextlib.AsyncExitStack, **changes: Any) -> None:
        dcs = {"timeout_s": 60.0, "bucket_mb": 1, "keep_deltas": 0, "shared_folder": False} | changes.pop("dcs", {})
        self.url, self.folder, self.stack = url, folder, stack
        self.config: RunConfig = make_config(run, workdir=str(folder / "work"), dcs=dcs, **changes)
        self.model_dir = folder / "model"
        self.model_dir.mkdir()
        (self.model_dir / "config.json").write_text("{}")
        (self.model_dir / "tokenizer.json").write_text('{"tokenizer": 1}')
        self.dcs: DcsClient
        self.ctx: Context
        self.dcs_child: asyncio.subprocess.Process

    async def open(self) -> None:
        self.ctx = await self.context("test", "test")
        await self.ctx.kv.put("config", self.config.dump())
        self.dcs = await self.stack.enter_async_context(DcsClient(self.ctx.kv))

    async def context(self, service: str, replica: str) -> Context:
        subjects = Subjects(self.config.run)
        connection = await Connection.open(self.url, name=replica, deadline_s=60)
        self.stack.push_async_callback(connection.close)
        queue = TransferQueue(connection, subjects)
        self.stack.push_async_callback(queue.close)
        await queue.ensure_streams(self.config)
        kv = await KV.open(connection, subjects.config_bucket)
        registry = await Registry.open(connection, subjects, ttl_s=self.config.heartbeat_ttl_s)
        return Context(service, replica, self.config, connection, queue, kv, registry)

    async def start_dcs(self) -> None:
        """In this process."""
        ctx = await self.context("dcs", "dcs-0")
        task = asyncio.create_task(dcs_main(ctx))
        self.stack.push_async_callback(_end, task)
        await self.dcs_answers(task)

    async def dcs_answers(self, task: asyncio.Task[None] | None = None) -> None:
        async def answers() -> bool:
            if task is not None and task.done():
                task.result()
            with contextlib.suppress(Exception):
                await self.dcs.members()
                return True
            return False

        await until(answers, "the DCS answers", 300)

    async def dcs_process(self) -> asyncio.subprocess.Process:
        """As a process of its own, which may be killed."""
        code = "import sys; from services.dcs.main import main; from shared.service import run_service; " + (
            "sys.exit(run_service('dcs', main, nats_url=sys.argv[1], run=sys.argv[2]))"
        )
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, self.url, self.config.run)

        async def end() -> None:
            if process.returncode is None:
                process.kill()
            await process.wait()

        self.stack.push_async_callback(end)
        return process

    async def publisher(self, name: str = "trainer-0", stages: Sequence[StageAddress] = ()) -> WeightPublisher:
        ctx = await self.context("trainer", name)
        publisher = WeightPublisher(ctx, self.model_dir, stages)
        self.stack.push_async_callback(publisher.close)
        return publisher

    async def replica(self, name: str, engine: Any = None, **options: Any) -> Replica:
        """Bootstrapped, attached and following."""
        ctx = await self.context("rollout", name)
        receiver = WeightReceiver(ctx, self.folder / "cache" / name)
        await ctx.beat("starting")
        start = await receiver.bootstrap()
        assert start is not None
        if engine is None:
            engine = FakeEngine(start.folder, **options)
            self.stack.callback(engine.close)
        await receiver.attach(engine, start)
        replica = Replica(ctx, receiver, engine, start)
        replica.tasks = [asyncio.create_task(receiver.run()), asyncio.create_task(_beat(ctx))]
        self.stack.push_async_callback(replica.stop)
        return replica

    async def received(self, version: int | None = None) -> list[Received]:
        found = self.ctx.queue.read("weights", subject=self.ctx.subjects.received)
        records = [decode(data, Received) async for data, _ in found]
        return [record for record in records if version is None or record.version == version]

    async def announced(self) -> list[Announcement]:
        found = self.ctx.queue.read("weights", subject=self.ctx.subjects.announced)
        return [decode(data, Announcement) async for data, _ in found]

    async def events(self) -> list[Event]:
        return [decode(data, Event) async for data, _ in self.ctx.queue.read("events")]

    async def publish(self, publisher: WeightPublisher, step: int, tensors: Weights | None = None) -> int:
        found = weights(float(step)) if tensors is None else tensors
        return await publisher.publish(step, iter(found.items()), "update")


async def _beat(ctx: Context) -> None:
    while True:
        await ctx.beat("serving")
        await asyncio.sleep(0.5)


async def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(scope="session")
def forks() -> None:
    """The server of forks has imported torch and answers at once from here on."""
    first = PROCESSES.Process(target=len, args=("",))
    first.start()
    first.join()


@pytest.fixture
async def make_world(broker: EmbeddedBroker, run_name: str, tmp_path: Path, forks: None) -> AsyncIterator[Any]:
    async with contextlib.AsyncExitStack() as stack:

        async def make(**changes: Any) -> World:
            world = World(broker.url, run_name, tmp_path, stack, **changes)
            await world.open()
            return world

        yield make


@pytest.fixture
async def world(make_world: Any) -> World:
    """With a DCS in this process."""
    made = await make_world()
    await made.start_dcs()
    return made
