"""Simulated rollout replicas for benchmarks/scale.py: many in one process, each with what a real one says to the broker.

    python -m benchmarks.scale_replicas URL RUN FIRST COUNT GROUP_S

Each has two connections of its own and does, through the same classes as a real one: pull one prompt at a time, "sample" for
GROUP_S seconds, store the group as a reward request, acknowledge; a heartbeat every 2 s, metrics every second, a look at the
run's state every second and whether it shall leave every 2 s; be a member of the DCS's group, follow the announcements of weights
and answer each. Prints `ready`, measures from the line `begin` on stdin to the line `end`, and prints its figures as one line of
JSON.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import sys
import time
import uuid
from collections.abc import Awaitable
from typing import Any

import numpy as np
import uvloop

from services.dcs.client import DcsClient, persist
from shared import wanted, wire
from shared.errors import TransportError
from shared.jetstream import Connection
from shared.kv import KV
from shared.records import Announcement, Group, Heartbeat, Metric, Received, Samples, floats, ints
from shared.registry import Registry
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue

TOKENS = 512
"""Of a sample."""
KINDS = ("kv_get", "heartbeat", "pull", "publish", "ack", "announced", "received")
BEAT_S, METRIC_S, STATE_S, LEAVING_S = 2.0, 1.0, 1.0, 2.0
OPENING = 16
"""Connections opened at once."""


class Replica:
    """One."""

    def __init__(self, url: str, run: str, number: int, group_s: float, times: dict[str, list[float]]) -> None:
        self.url, self.subjects, self.name = url, Subjects(run), f"rollout-{number}"
        self.group_s, self.times, self.groups = group_s, times, 0
        self.measuring = False

    async def open(self) -> None:
        self.connection = await Connection.open(self.url, name=self.name, deadline_s=60)
        self.queue = TransferQueue(self.connection, self.subjects)
        self.kv = await KV.open(self.connection, self.subjects.config_bucket, create=False)
        services = await KV.open(self.connection, self.subjects.services_bucket, ttl=True, create=False)
        self.registry = Registry(services, 15.0)
        await self.beat()  # a member without a heartbeat is put out
        incarnation = uuid.uuid4().hex
        async with DcsClient(self.kv) as dcs:
            await persist(lambda: dcs.join(self.name, incarnation=incarnation, world_size=1), self.rest)

    async def rest(self, seconds: float) -> bool:
        await asyncio.sleep(seconds)
        return True

    async def live(self) -> None:
        """Until cancelled."""
        beating = asyncio.create_task(self.every(BEAT_S, self.beat))
        await asyncio.sleep(random.uniform(0.0, self.group_s))  # replicas do not work in step
        await asyncio.gather(
            beating,
            self.sample(),
            self.follow_weights(),
            self.every(METRIC_S, self.emit),
            self.every(STATE_S, lambda: self.timed("kv_get", self.kv.get("state"))),
            self.every(LEAVING_S, lambda: wanted.leaves(self.kv, self.name)),
        )

    async def every(self, seconds: float, act: Any) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await act()
            except TransportError as error:
                print(f"{self.name}: {error}", file=sys.stderr, flush=True)

    async def timed(self, name: str, work: Awaitable[Any]) -> Any:
        started = time.perf_counter()
        result = await work
        self.note(name, time.perf_counter() - started)
        return result

    def note(self, name: str, seconds: float) -> None:
        if self.measuring:
            self.times[name].append(seconds)

    async def beat(self) -> None:
        now = time.time()
        beat = Heartbeat(
            "rollout", self.name, "sampling", self.groups, 1, 1, {"running": 1}, "h", os.getpid(), now, now
        )
        await self.timed("heartbeat", self.registry.beat(beat))

    async def emit(self) -> None:
        values = {
            "groups_total": 1.0,
            "samples_total": 8.0,
            "tokens_total": 1.0,
            "running": 1.0,
            "busy_s": 1.0,
            "cpu_s": 1.0,
        }
        metric = Metric("rollout", self.name, None, values, time.time())
        self.queue.emit(self.subjects.metrics("rollout", self.name), metric)

    async def sample(self) -> None:
        puller = await self.queue.pull("prompts", "rollout", prefetch=0)
        while True:
            started = time.perf_counter()
            delivery = await puller.next(1.0)
            if delivery is None:
                continue
            self.note("pull", time.perf_counter() - started)
            group = wire.decode(delivery.data, Group)
            await asyncio.sleep(self.group_s * random.uniform(0.5, 1.5))
            group.samples, group.replica = samples_of(group.sampling.n), self.name
            await self.timed("publish", self.queue.publish(self.subjects.reward_requests, group, msg_id=group.id))
            await self.timed("ack", delivery.ack())
            self.groups += self.measuring

    async def follow_weights(self) -> None:
        async for data, _ in self.queue.read("weights", subject=self.subjects.announced, live=True):
            told = announcement(data)
            self.note("announced", time.time() - told.at)
            answer = Received(self.name, told.version, told.step, told.digest, "broadcast", {}, True, "", time.time())
            await self.timed("received", self.queue.publish(self.subjects.received, answer))


@functools.lru_cache(maxsize=4)
def announcement(data: bytes) -> Announcement:
    """Decoded once for all replicas of this process; real ones do it at the same time, on machines of their own."""
    return wire.decode(data, Announcement)


def samples_of(n: int) -> Samples:
    """Noise: it cannot be compressed, and nobody reads it."""
    total = n * TOKENS
    rng = np.random.default_rng()
    zeros = [0] * n
    return Samples(
        lengths=ints([TOKENS] * n),
        ids=ints(rng.integers(0, 50_000, total)),
        logprobs=floats(-rng.random(total)),
        mask=np.ones(total, dtype="|u1"),
        finish=["length"] * n,
        texts=[""] * n,
        span_sample=ints(list(range(n))),
        span_start=ints(zeros),
        span_end=ints([TOKENS] * n),
        span_version=ints([1] * n),
        span_step=ints(zeros),
    )


async def main(url: str, run: str, first: int, count: int, group_s: float) -> None:
    times: dict[str, list[float]] = {name: [] for name in KINDS}
    replicas = [Replica(url, run, number, group_s, times) for number in range(first, first + count)]
    for start in range(0, count, OPENING):
        await asyncio.gather(*(one.open() for one in replicas[start : start + OPENING]))
    tasks = [asyncio.create_task(one.live()) for one in replicas]
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, sys.stdin.readline)
    cpu = time.process_time()
    for one in replicas:
        one.measuring = True
    await loop.run_in_executor(None, sys.stdin.readline)
    for one in replicas:
        one.measuring = False
    failed = [task for task in tasks if task.done()]
    figures = {"groups": sum(one.groups for one in replicas), "cpu_s": time.process_time() - cpu, "times": times}
    print(json.dumps(figures | {"failed": len(failed)}), flush=True)
    for task in failed:
        print(f"a replica ended: {task.exception()!r}", file=sys.stderr, flush=True)
    os._exit(0)  # closing thousands of connections one by one is not what is measured


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])))
