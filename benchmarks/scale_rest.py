"""What is one process in benchmarks/scale.py: reward and trainer in one, a sink of metrics, and a launcher's looks.

Only what they say to the broker and to the DCS is real: groups are not scored or trained on, and the weights of a version are a
manifest of as many tensors as a model of eight billion parameters has, without bytes behind it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections.abc import Awaitable

from services.dcs import snapshots
from services.dcs.client import DcsClient, persist
from services.dcs.digest import TensorSpec, digest
from services.dcs.snapshots import Manifest
from services.dcs.state import Meeting
from services.trainer.window import Window
from shared import wire
from shared.config import RunConfig
from shared.jetstream import Connection
from shared.kv import KV
from shared.records import Group, Metric, Receipt, ints
from shared.registry import Registry
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue

TENSORS = 399
"""Of Qwen3-8B."""
MEET_S = 60.0
LOOK_S = 0.5
"""Between two looks of `slipstream up` at all heartbeats."""


class Rest:
    """`run` for ever, on a run whose config, streams and DCS are there."""

    def __init__(self, connection: Connection, kv: KV, registry: Registry, config: RunConfig) -> None:
        self.subjects, self.config, self.registry = Subjects(config.run), config, registry
        self.queue = TransferQueue(connection, self.subjects)
        self.dcs = DcsClient(kv)
        self.publisher, self.epoch = uuid.uuid4().hex, 0
        self.window: Window[Group] = Window(1)
        self.step, self.batch = 0, list[Group]()
        self.versions = 0
        self.times: dict[str, list[float]] = {"metric": [], "look": []}
        self.measuring = False

    async def meet(self) -> None:
        """Wait for the DCS."""

        async def pause(seconds: float) -> bool:
            await asyncio.sleep(seconds)
            return True

        async with asyncio.timeout(MEET_S):
            await persist(self.dcs.members, pause)

    async def run(self) -> None:
        endless: list[Awaitable[None]] = [self.work(), self.sink(), self.look()]
        await asyncio.gather(*endless)

    async def work(self) -> None:
        """Reward and trainer."""
        puller = await self.queue.pull("rewards", "reward", prefetch=64)
        while True:
            if (delivery := await puller.next(1.0)) is None:
                continue
            group = wire.decode(delivery.data, Group)
            await self.queue.publish(self.subjects.trajectory(group.id), group, group.id)
            await delivery.ack()
            self.window.offer(group.issue, group)
            self.batch += [one for _, one in self.window.take(self.config.groups_per_step - len(self.batch))]
            if len(self.batch) == self.config.groups_per_step:
                await self.update()

    async def update(self) -> None:
        groups, self.batch = self.batch, []
        messages = [(self.subjects.receipts, self.receipt(one), f"trained:{one.id}") for one in groups]
        await self.queue.publish_all(messages)
        self.step += 1
        await self.publish()

    def receipt(self, group: Group) -> Receipt:
        drawn, where = ints([self.step] * group.sampling.n), (group.id, group.issue, group.seat, group.min_step)
        said = {"step": self.step, "sample_steps": drawn, "reward": 0.5, "replica": group.replica}
        return Receipt("trained", *where, **said, at=time.time())  # type: ignore[arg-type]

    async def publish(self) -> None:
        """The version of this step: told to the DCS, announced by it, and broadcast at once as far as anybody knows."""
        names = [f"model.layers.{n // 11}.part_{n % 11}.weight" for n in range(TENSORS)]
        sums = [hashlib.sha256(f"{name} {self.step}".encode()).hexdigest() for name in names]
        specs = [TensorSpec(name, "bfloat16", (4096, 4096), one) for name, one in zip(names, sums, strict=True)]
        found = digest(specs)
        told = await self.dcs.allocate(publisher=self.publisher, step=self.step, digest=found, reason="step")
        version, root = int(told["version"]), self.config.work_path / "snapshots"
        part = snapshots.partial(root, version, "benchmark")
        part.mkdir(parents=True)
        snapshots.complete(root, part, Manifest(version, self.step, found, [], specs, [list(range(TENSORS))]))
        announced = await self.dcs.announce(
            version, publisher=self.publisher, epoch=self.epoch, senders=[Meeting("127.0.0.1", 1)]
        )
        self.epoch = announced["group"]["epoch"] if announced["group"] else 0
        await self.dcs.result(version, publisher=self.publisher, ok=True, error="", seconds={})
        self.versions += self.measuring

    async def sink(self) -> None:
        """All metrics, as a dashboard or TensorBoard has them."""
        async for data, _ in self.queue.read("metrics", live=True):
            metric = wire.decode(data, Metric)
            if self.measuring and metric.service == "rollout":
                self.times["metric"].append(time.time() - metric.at)

    async def look(self) -> None:
        """Who is alive, as whoever starts and ends replicas asks."""
        while True:
            await asyncio.sleep(LOOK_S)
            started = time.perf_counter()
            await self.registry.alive()
            if self.measuring:
                self.times["look"].append(time.perf_counter() - started)
