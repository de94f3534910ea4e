"""The systems that benchmarks/transfer_queue.py compares: how each one sends a trajectory and receives it.

Every producer makes the same content from the same seeds, and every consumer decodes it to numpy and adds up what it saw; a
consumer that got anything else, or anything twice, fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import msgpack
import numpy as np

from shared import wire
from shared.allocator import keep_freed_blocks
from shared.config import RunConfig, parse
from shared.jetstream import Connection
from shared.records import Group, Rewards, Samples, Sampling, floats, ints
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue

IDLE_S = 30.0
Ready = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Work:
    """One round of one system, and one producer's share of it."""

    system: str
    url: str
    name: str
    total: int
    tokens: int
    group: int
    producers: int
    per_s: float
    """Trajectories a second of all producers; 0: as fast as it goes."""
    share: int = 0

    def of(self, share: int) -> Work:
        return replace(self, share=share)

    @property
    def groups(self) -> range:
        """The groups of this share."""
        return range(self.share, self.total // self.group, self.producers)


@dataclass(slots=True)
class Report:
    """What one process has to say at the end."""

    cpu_s: float
    finished: float = 0.0
    latencies: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Trajectory:
    """As a consumer decodes it."""

    uid: int
    ids: np.ndarray
    logprobs: np.ndarray
    mask: np.ndarray
    reward: float
    at: float


@dataclass(slots=True)
class Batch:
    """The trajectories of one group as an engine leaves them: columns of G rows. Plain systems send the rows one by one."""

    number: int
    ids: np.ndarray
    logprobs: np.ndarray
    mask: np.ndarray
    rewards: np.ndarray
    at: float = 0.0

    def rows(self) -> list[Trajectory]:
        first, rows = (
            self.number * len(self.ids),
            zip(self.ids, self.logprobs, self.mask, self.rewards.tolist(), strict=True),
        )
        return [Trajectory(first + i, *row, self.at) for i, row in enumerate(rows)]


class System(Protocol):
    """How one system sends and receives. `send` may batch the trajectories of a group as its users would."""

    uvloop: bool

    async def open_producer(self, work: Work) -> None: ...

    async def send(self, batch: Batch) -> None: ...

    async def finish(self) -> None: ...

    async def open_consumer(self, work: Work) -> None: ...

    def receive(self) -> AsyncIterator[list[Trajectory]]: ...

    async def close(self) -> None: ...


def content(work: Work, group: int) -> Batch:
    """The trajectories of one group, from its number."""
    draw = np.random.default_rng(group)
    ids = draw.integers(0, 150_000, (work.group, work.tokens), dtype=np.int32)
    logprobs = -draw.random((work.group, work.tokens), dtype=np.float32)
    mask = (draw.random((work.group, work.tokens), dtype=np.float32) < 0.9).astype(np.uint8)
    return Batch(group, ids, logprobs, mask, floats(np.arange(work.group) / 8))


async def produce(work: Work, ready: Ready) -> Report:
    system = SYSTEMS[work.system]()
    await system.open_producer(work)
    batches = [content(work, group) for group in work.groups]
    await ready()
    started, cpu = time.monotonic(), time.process_time()
    for number, batch in enumerate(batches):
        if work.per_s:
            due = started + (number + work.share / work.producers) * work.group * work.producers / work.per_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        batch.at = time.time()
        await system.send(batch)
    await system.finish()
    report = Report(time.process_time() - cpu)
    await system.close()
    return report


async def consume(work: Work, ready: Ready) -> Report:
    system = SYSTEMS[work.system]()
    await system.open_consumer(work)
    await ready()
    cpu, seen, tokens = time.process_time(), set(), 0
    report = Report(0.0)
    async for batch in system.receive():
        now = time.time()
        for one in batch:
            seen.add(one.uid)
            tokens += int(one.ids[0]) + len(one.logprobs) + len(one.mask)
            report.latencies.append(now - one.at)
        if len(seen) >= work.total:
            break
    report.finished, report.cpu_s = time.time(), time.process_time() - cpu
    expected = [one for group in range(work.total // work.group) for one in content(work, group).rows()]
    if seen != {one.uid for one in expected} or len(report.latencies) != len(seen):
        raise RuntimeError(f"{work.system}: {len(report.latencies)} trajectories arrived, {len(seen)} different ones")
    if tokens != sum(int(one.ids[0]) + 2 * work.tokens for one in expected):
        raise RuntimeError(f"{work.system}: what arrived is not what was sent")
    await system.close()
    return report


def pack(one: Trajectory) -> dict[str, Any]:
    columns = {"ids": one.ids.tobytes(), "lp": one.logprobs.tobytes(), "mask": one.mask.tobytes()}
    return {"uid": one.uid, "reward": one.reward, "at": one.at, **columns}


def unpack(data: dict[str, Any]) -> Trajectory:
    ids, logprobs = np.frombuffer(data["ids"], "<i4"), np.frombuffer(data["lp"], "<f4")
    return Trajectory(data["uid"], ids, logprobs, np.frombuffer(data["mask"], "u1"), data["reward"], data["at"])


class SlipstreamQueue:
    """The TransferQueue, used as the services use it."""

    uvloop = True

    async def _open(self, work: Work) -> None:
        keep_freed_blocks()
        self.work = work
        self.connection = await Connection.open(work.url, name="benchmark")
        self.queue = TransferQueue(self.connection, Subjects(f"{work.name}-ours"))
        self.pending: list[asyncio.Future[Any]] = []

    async def open_producer(self, work: Work) -> None:
        await self._open(work)

    async def send(self, batch: Batch) -> None:
        group = _as_group(batch)
        self.pending.append(await self.queue.submit(self.queue.subjects.advantages, group, group.id))

    async def finish(self) -> None:
        await asyncio.gather(*self.pending)

    async def open_consumer(self, work: Work) -> None:
        await self._open(work)
        await self.queue.ensure_streams(_config(self.queue.subjects.run))
        self.puller = await self.queue.pull("advantages", "trainer", prefetch=64)

    async def receive(self) -> AsyncIterator[list[Trajectory]]:
        count = 0
        while count < self.work.total and (delivery := await self.puller.next(IDLE_S)) is not None:
            group = wire.decode(delivery.data, Group)
            self.pending.append(asyncio.create_task(delivery.ack()))
            count += self.work.group
            if count == self.work.total:
                await asyncio.gather(*self.pending)
            yield _of_group(group)

    async def close(self) -> None:
        await self.queue.close()
        await self.connection.close()


def _config(run: str) -> RunConfig:
    data: dict[str, Any] = {"run": run, "steps": 1, "groups_per_step": 8, "samples_per_group": 8}
    data |= {
        "model": {"path": "."},
        "prompts": {"source": "none.jsonl"},
        "reward": {"functions": [{"path": "none.none"}]},
    }
    return parse(data, "benchmark")


def _as_group(batch: Batch) -> Group:
    size, length = batch.ids.shape
    zeros = ints(np.zeros(size))
    samples = Samples(
        lengths=ints(np.full(size, length)),
        ids=batch.ids.reshape(-1),
        logprobs=batch.logprobs.reshape(-1),
        mask=batch.mask.reshape(-1),
        finish=["length"] * size,
        texts=[""] * size,
        span_sample=ints(range(size)),
        span_start=zeros,
        span_end=ints(np.full(size, length)),
        span_version=zeros,
        span_step=zeros,
    )
    return Group(
        f"0-{batch.number}",
        "train",
        batch.number,
        0,
        0,
        "",
        None,
        {},
        Sampling(size, length),
        samples=samples,
        rewards=Rewards(batch.rewards, {}, [""] * size),
        times={"sampled": batch.at},
    )


def _of_group(group: Group) -> list[Trajectory]:
    assert group.samples is not None
    assert group.rewards is not None
    s, offsets, first = group.samples, group.samples.offsets.tolist(), group.issue * len(group.samples.lengths)
    return [
        Trajectory(
            first + i, s.ids[a:b], s.logprobs[a:b], s.mask[a:b], float(group.rewards.total[i]), group.times["sampled"]
        )
        for i, (a, b) in enumerate(pairwise(offsets))
    ]


class NatsPy:
    """Plain nats-py: one trajectory a message, publish_async, fetch(64), ack."""

    uvloop = False
    batch = 64

    async def _open(self, work: Work) -> None:
        import nats

        self.work, self.stream = work, f"{work.name}_{work.system}"
        self.nc = await nats.connect(work.url, pending_size=64 << 20)
        self.js = self.nc.jetstream()
        self.futures: list[asyncio.Future[Any]] = []

    async def open_producer(self, work: Work) -> None:
        await self._open(work)

    async def send(self, batch: Batch) -> None:
        for one in batch.rows():
            self.futures.append(await self.js.publish_async(f"{self.stream}.t", msgpack.packb(pack(one))))

    async def finish(self) -> None:
        await asyncio.gather(*self.futures)

    async def open_consumer(self, work: Work) -> None:
        from nats.js.api import RetentionPolicy, StorageType

        await self._open(work)
        await self.js.add_stream(
            name=self.stream,
            subjects=[f"{self.stream}.>"],
            retention=RetentionPolicy.WORK_QUEUE,
            storage=StorageType.FILE,
        )
        self.sub = await self.js.pull_subscribe(f"{self.stream}.>", "trainer")

    async def receive(self) -> AsyncIterator[list[Trajectory]]:
        while True:
            messages = await self.sub.fetch(self.batch, timeout=IDLE_S)
            found = []
            for message in messages:
                found += self.decode(message.data)
                await message.ack()
            yield found

    def decode(self, data: bytes) -> list[Trajectory]:
        return [unpack(msgpack.unpackb(data))]

    async def close(self) -> None:
        await self.nc.close()


class NatsPyAwait(NatsPy):
    """The same with an awaited publish a message."""

    async def send(self, batch: Batch) -> None:
        for one in batch.rows():
            await self.js.publish(f"{self.stream}.t", msgpack.packb(pack(one)))


class NatsPyGroups(NatsPy):
    """nats-py with all 8 trajectories of a group in a message, on uvloop."""

    uvloop = True

    async def send(self, batch: Batch) -> None:
        self.futures.append(
            await self.js.publish_async(f"{self.stream}.t", msgpack.packb([pack(one) for one in batch.rows()]))
        )

    def decode(self, data: bytes) -> list[Trajectory]:
        return [unpack(one) for one in msgpack.unpackb(data)]


class RedisStreams:
    """Redis streams through redis-py: one trajectory an entry, pipelines of a group."""

    uvloop = False

    async def _open(self, work: Work) -> None:
        import redis

        self.work, self.key = work, f"{work.name}.t"
        self.redis = redis.Redis.from_url(work.url)

    async def open_producer(self, work: Work) -> None:
        await self._open(work)

    async def send(self, batch: Batch) -> None:
        pipeline = self.redis.pipeline(transaction=False)
        for one in batch.rows():
            pipeline.xadd(self.key, {"d": msgpack.packb(pack(one))})
        pipeline.execute()

    async def finish(self) -> None: ...

    async def open_consumer(self, work: Work) -> None:
        await self._open(work)
        self.redis.xgroup_create(self.key, "trainer", id="0", mkstream=True)

    async def receive(self) -> AsyncIterator[list[Trajectory]]:
        while True:
            answer: Any = self.redis.xreadgroup("trainer", "0", {self.key: ">"}, count=64, block=int(IDLE_S * 1000))
            for _, entries in answer:
                names = [name for name, _ in entries]
                found = [unpack(msgpack.unpackb(fields[b"d"])) for _, fields in entries]
                pipeline = self.redis.pipeline(transaction=False)
                pipeline.xack(self.key, "trainer", *names)
                pipeline.xdel(self.key, *names)
                pipeline.execute()
                yield found

    async def close(self) -> None:
        self.redis.close()


SYSTEMS: dict[str, type[System]] = {
    "transfer_queue": SlipstreamQueue,
    "nats_py": NatsPy,
    "nats_py_await": NatsPyAwait,
    "nats_py_groups": NatsPyGroups,
    "redis": RedisStreams,
}
