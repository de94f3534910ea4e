"""How many rollout replicas one broker carries: 10, 100 and 1,000 simulated ones at a realistic mix of messages.

    python -m benchmarks.scale [--sizes 10 100 1000] [--seconds 20] [--group-s 10]

Real are the broker, the controller service and the transport; the replicas are simulated, many asyncio clients in few
processes, each with two connections and everything that a rollout says (benchmarks/scale_replicas.py): a replica makes a group
of 8 samples of 512 tokens (37 KB) every 10 s, so that a thousand of them make 100 groups a second. One process stands for reward
and trainer: it takes the reward requests, writes trajectories, and answers with receipts, an update for every `replicas` groups,
and a new version of the weights with each.

Told for each size: the broker's CPU, in cores and per group; the controller's CPU per group; round trips, p50 and p99, as the
replicas measured them: `kv_get` and `heartbeat` on the control connection, `publish` of a group and `ack` on the bulk one. The
baseline is the size before: `growth` is the broker's cores over those at a tenth of the replicas, and the aim is 10, that is
linear, or less (what the broker does with nobody there is in both). The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from services.trainer.window import Window
from shared import wire
from shared.broker import EmbeddedBroker
from shared.config import RunConfig, parse
from shared.jetstream import Connection
from shared.kv import KV
from shared.records import Announcement, Group, Receipt, ints
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue

SAMPLES = 8
PER_PROCESS = 250
WARM_S = 1.5
"""Before measuring, as a multiple of a group's time: until the replicas are out of step."""
AIM = 10.0
SOURCE = "def prompts(seed, index):\n    return {'prompt': f'Sort these letters: {index:040d}', 'answer': index}\n"


@dataclass(slots=True)
class Row:
    """One size."""

    replicas: int
    groups_per_s: float
    broker_cores: float
    broker_ms_per_group: float
    controller_ms_per_group: float
    clients_cores: float
    p50_ms: dict[str, float]
    p99_ms: dict[str, float]


def config_of(run: str, base: str, replicas: int) -> RunConfig:
    data: dict[str, Any] = {"run": run, "steps": 100_000, "groups_per_step": replicas, "samples_per_group": SAMPLES}
    data |= {"model": {"path": "m"}, "reward": {"functions": [{"path": "a.b"}]}, "base": base, "workdir": base}
    data |= {"prompts": {"source": "scale_prompts.prompts", "size": 1_000_000}, "broker": {"max_bytes": 64 << 30}}
    data |= {"sampling": {"max_new_tokens": 512, "max_prompt_tokens": 128}, "trainer": {"checkpoint": {"every": 1}}}
    return parse(data, "benchmark")


class Rest:
    """Reward and trainer in one."""

    def __init__(self, connection: Connection, config: RunConfig) -> None:
        self.subjects, self.config = Subjects(config.run), config
        self.queue = TransferQueue(connection, self.subjects)
        self.window: Window[Group] = Window(1)
        self.step, self.batch, self.trained = 0, list[Group](), 0

    async def run(self) -> None:
        await self.announce()
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
        await self.queue.publish_all(
            [(self.subjects.receipts, self.receipt(one), f"trained:{one.id}") for one in groups]
        )
        self.step, self.trained = self.step + 1, self.trained + len(groups)
        await self.announce()

    def receipt(self, group: Group) -> Receipt:
        drawn = ints([self.step] * SAMPLES)
        return Receipt(
            "trained", group.id, group.issue, group.seat, group.min_step, step=self.step, sample_steps=drawn, reward=0.5
        )

    async def announce(self) -> None:
        told = Announcement(
            self.step + 1, self.step, ["w"], ["F32"], [[1]], ["s"], "d", None, [[0]], "", "step", time.time()
        )
        await self.queue.publish(self.subjects.announced, told, f"v{self.step + 1}")


async def measure(url: str, broker: psutil.Process, replicas: int, seconds: float, group_s: float, base: str) -> Row:
    """One size, in a run of its own."""
    config = config_of(f"scale{replicas}", base, replicas)
    connection = await Connection.open(url, name="rest", deadline_s=30)
    kv = await KV.open(connection, Subjects(config.run).config_bucket)
    await KV.open(connection, Subjects(config.run).services_bucket, ttl=True)
    await kv.put("config", config.dump())
    await kv.put("state", b"running")
    rest = Rest(connection, config)
    await rest.queue.ensure_streams(config)
    resting = asyncio.create_task(rest.run())
    controller = await start("services.controller.cli", "serve", "controller", "--nats", url, "--run", config.run)
    firsts = range(0, replicas, PER_PROCESS)
    sizes = [min(PER_PROCESS, replicas - first) for first in firsts]
    workers = [
        await start("benchmarks.scale_replicas", url, config.run, str(first), str(size), str(group_s))
        for first, size in zip(firsts, sizes, strict=True)
    ]
    try:
        for worker in workers:
            await asyncio.wait_for(said(worker), 300)
        await asyncio.sleep(WARM_S * group_s)
        before, began = (cpu(broker), cpu(psutil.Process(controller.pid))), time.monotonic()
        tell(workers, "begin")
        await asyncio.sleep(seconds)
        tell(workers, "end")
        after, took = (cpu(broker), cpu(psutil.Process(controller.pid))), time.monotonic() - began
        if resting.done():
            resting.result()
        figures = [json.loads(await asyncio.wait_for(said(worker), 120)) for worker in workers]
    finally:
        resting.cancel()
        for process in (controller, *workers):
            if process.returncode is None:
                process.kill()
        await asyncio.gather(resting, *(process.wait() for process in (controller, *workers)), return_exceptions=True)
        await connection.close()
    return row(replicas, figures, after[0] - before[0], after[1] - before[1], took)


def row(replicas: int, figures: list[dict[str, Any]], broker_s: float, controller_s: float, took: float) -> Row:
    if ended := sum(one["failed"] for one in figures):
        raise RuntimeError(f"{ended} of {replicas} replicas ended by an error, which is above")
    groups = sum(one["groups"] for one in figures)
    times = {name: np.concatenate([one["times"][name] for one in figures]) * 1e3 for name in figures[0]["times"]}
    return Row(
        replicas,
        groups / took,
        broker_s / took,
        broker_s * 1e3 / max(groups, 1),
        controller_s * 1e3 / max(groups, 1),
        sum(one["cpu_s"] for one in figures) / took,
        {name: round(float(np.percentile(found, 50)), 2) for name, found in times.items() if len(found)},
        {name: round(float(np.percentile(found, 99)), 2) for name, found in times.items() if len(found)},
    )


async def start(module: str, *arguments: str) -> Process:
    """A Python process that is told by lines on stdin."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLIPSTREAM_LOG": "ERROR"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, stdin=PIPE, stdout=PIPE, limit=1 << 28, env=environment
    )


async def said(process: Process) -> str:
    assert process.stdout is not None
    if not (line := (await process.stdout.readline()).decode().strip()):
        raise RuntimeError(f"process {process.pid} ended; what it said is above")
    return line


def tell(processes: list[Process], word: str) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(f"{word}\n".encode())


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--group-s", type=float, default=10.0)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "scale_prompts.py").write_text(SOURCE)
        for size in options.sizes:
            store = Path(folder, f"broker-{size}")
            with EmbeddedBroker(store, options={"jetstream": {"max_file_store": 1 << 42}}, tied=True) as broker:
                work = measure(broker.url, psutil.Process(broker.pid), size, options.seconds, options.group_s, folder)
                rows.append(asyncio.run(work))
            show(rows[-1])
    growth = {
        f"{after.replicas}/{before.replicas}": round(
            after.broker_cores / before.broker_cores / (after.replicas / before.replicas) * AIM, 2
        )
        for before, after in pairwise(rows)
    }
    worst = max(growth.values(), default=0.0)
    print(f"broker's cores for ten times the replicas: {growth}, aim at most {AIM:g}")
    print(
        json.dumps(
            {"rows": [asdict(one) for one in rows], "growth": growth, "ok": worst <= AIM, "cores": os.cpu_count()}
        )
    )


def show(one: Row) -> None:
    print(
        f"{one.replicas:5d} replicas: {one.groups_per_s:6.1f} groups/s; broker {one.broker_cores:.3f} cores, "
        f"{one.broker_ms_per_group:.2f} ms/group; controller {one.controller_ms_per_group:.2f} ms/group; "
        f"replicas {one.clients_cores:.2f} cores; p50 {one.p50_ms} p99 {one.p99_ms} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
