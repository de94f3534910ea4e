"""How many rollout replicas one broker carries: 10, 100 and 1,000 simulated ones at a realistic mix of messages.

    python -m benchmarks.scale [--replicas 10,100,1000] [--seconds 40] [--group-s 20]

Real are the broker, the controller, the DCS and the transport; the replicas are simulated, many asyncio clients in few processes,
each with two connections and everything that a rollout says (benchmarks/scale_replicas.py). The offered load of a replica is a
group of 8 samples of 512 tokens (37 KB) every 20 s, a heartbeat every 2 s, metrics every second, 1.5 looks at the config bucket
a second, and an answer to each version of the weights; so a thousand of them make 50 groups and 3,000 small messages a second.
One process stands for reward, trainer, a sink of metrics and a launcher (benchmarks/scale_rest.py): an update and a new version
of the weights come with every `replicas` groups, that is every 20 s at each size.

Told for each size: CPU of the broker, in cores and per group, of the controller per group and of the DCS per version; round
trips, p50 and p99, as the clients measured them: `kv_get` and `heartbeat` and `received` on the control connection, `pull`,
`publish` and `ack` of a group on the bulk one; `announced` and `metric` from the sender to the reader; `look`, all heartbeats at
once. The baseline is the size before: `growth` is the CPU for ten times the replicas, and the aim is 10, that is linear, or
less (what is done with nobody there is in both). Trust the CPU; where the machine is full, latencies are those of the clients.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
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

from benchmarks.scale_rest import Rest
from shared import wanted
from shared.broker import EmbeddedBroker
from shared.config import RunConfig, parse
from shared.jetstream import Connection
from shared.kv import KV
from shared.registry import Registry
from shared.subjects import Subjects

SAMPLES = 8
PER_PROCESS = 250
WARM = 1.5
"""Before measuring, as a multiple of a group's time: until all are at work and out of step."""
OPEN_S = 300.0
AIM = 10.0
SERVERS = ("broker", "controller", "dcs")
SOURCE = "def prompts(seed, index):\n    return {'prompt': f'Sort these letters: {index:040d}', 'answer': index}\n"


@dataclass(slots=True)
class Row:
    """One size."""

    replicas: int
    groups_per_s: float
    versions: int
    broker_cores: float
    broker_ms_per_group: float
    controller_cores: float
    controller_ms_per_group: float
    dcs_cores: float
    dcs_ms_per_version: float
    clients_cores: float
    per_s: dict[str, float]
    """How often each of what is timed was done: whether the load was what was to be offered."""
    p50_ms: dict[str, float]
    p99_ms: dict[str, float]


def config_of(run: str, base: str, replicas: int) -> RunConfig:
    data: dict[str, Any] = {"run": run, "steps": 2000, "groups_per_step": replicas, "samples_per_group": SAMPLES}
    data |= {"max_staleness": 3}  # so many credits that a prompt is always there, and a pull waits for the broker alone
    data |= {"model": {"path": "m"}, "reward": {"functions": [{"path": "a.b"}]}, "base": base, "workdir": base}
    data |= {"prompts": {"source": "scale_prompts.prompts", "size": 1_000_000}, "broker": {"max_bytes": 64 << 30}}
    data |= {"sampling": {"max_new_tokens": 512, "max_prompt_tokens": 128}, "dcs": {"keep_deltas": 0}}
    return parse(data, "benchmark")


async def measure(url: str, broker: psutil.Process, replicas: int, seconds: float, group_s: float, base: str) -> Row:
    """One size, in a run of its own."""
    config = config_of(f"scale{replicas}", base, replicas)
    connection = await Connection.open(url, name="rest", deadline_s=30)
    kv = await KV.open(connection, Subjects(config.run).config_bucket)
    registry = await Registry.open(connection, Subjects(config.run))
    await kv.put("config", config.dump())
    await kv.put("state", b"running")
    specs = {f"rollout-{n}": {"service": "rollout", "by": "", "engine_url": ""} for n in range(replicas)}
    await wanted.change(kv, lambda _: wanted.Wanted(specs))
    rest = Rest(connection, kv, registry, config)
    await rest.queue.ensure_streams(config)
    services = [
        await start("services.controller.cli", "serve", name, "--nats", url, "--run", config.run)
        for name in ("controller", "dcs")
    ]
    await rest.meet()
    firsts = range(0, replicas, PER_PROCESS)
    sizes = [min(PER_PROCESS, replicas - first) for first in firsts]
    workers = [
        await start("benchmarks.scale_replicas", url, config.run, str(first), str(size), str(group_s))
        for first, size in zip(firsts, sizes, strict=True)
    ]
    resting = asyncio.create_task(rest.run())
    try:
        for worker in workers:
            await asyncio.wait_for(said(worker), OPEN_S)
        await rest.publish()
        await asyncio.sleep(WARM * group_s)
        measured = [broker, *(psutil.Process(one.pid) for one in services)]
        before, began = [cpu(one) for one in measured], time.monotonic()
        rest.measuring = True
        tell(workers, "begin")
        await asyncio.sleep(seconds)
        tell(workers, "end")
        rest.measuring = False
        used, took = [cpu(one) - was for one, was in zip(measured, before, strict=True)], time.monotonic() - began
        figures = [json.loads(await asyncio.wait_for(said(worker), OPEN_S)) for worker in workers]
        if resting.done():
            resting.result()
    finally:
        resting.cancel()
        for process in (*services, *workers):
            if process.returncode is None:
                process.kill()
        await asyncio.gather(resting, *(process.wait() for process in (*services, *workers)), return_exceptions=True)
        await rest.dcs.close()
        await connection.close()
    figures[0]["times"] |= rest.times
    return row(replicas, figures, used, took, rest.versions)


def row(replicas: int, figures: list[dict[str, Any]], used: list[float], took: float, versions: int) -> Row:
    if ended := sum(one["failed"] for one in figures):
        raise RuntimeError(f"{ended} of {replicas} replicas ended by an error, which is above")
    groups = sum(one["groups"] for one in figures)
    kinds = figures[0]["times"]
    times = {kind: np.concatenate([one["times"].get(kind, []) for one in figures]) * 1e3 for kind in kinds}
    broker_s, controller_s, dcs_s = used
    return Row(
        replicas=replicas,
        groups_per_s=groups / took,
        versions=versions,
        broker_cores=broker_s / took,
        broker_ms_per_group=broker_s * 1e3 / max(groups, 1),
        controller_cores=controller_s / took,
        controller_ms_per_group=controller_s * 1e3 / max(groups, 1),
        dcs_cores=dcs_s / took,
        dcs_ms_per_version=dcs_s * 1e3 / max(versions, 1),
        clients_cores=sum(one["cpu_s"] for one in figures) / took,
        per_s={kind: round(len(found) / took, 2) for kind, found in times.items()},
        p50_ms={kind: round(float(np.percentile(found, 50)), 2) for kind, found in times.items() if len(found)},
        p99_ms={kind: round(float(np.percentile(found, 99)), 2) for kind, found in times.items() if len(found)},
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
    parser.add_argument("--replicas", default="10,100,1000")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--group-s", type=float, default=20.0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for size in (int(text) for text in options.replicas.split(",")):
            base = Path(folder, f"run-{size}")
            base.mkdir()
            Path(base, "scale_prompts.py").write_text(SOURCE)
            with EmbeddedBroker(
                base / "broker", options={"jetstream": {"max_file_store": 1 << 42}}, tied=True
            ) as broker:
                work = measure(
                    broker.url, psutil.Process(broker.pid), size, options.seconds, options.group_s, str(base)
                )
                rows.append(asyncio.run(work))
            show(rows[-1])
    growth = {f"{after.replicas}/{before.replicas}": grown(before, after) for before, after in pairwise(rows)}
    worst = max((value for one in growth.values() for value in one.values()), default=0.0)
    print(f"CPU for ten times the replicas: {growth}, aim at most {AIM:g}: {'ok' if worst <= AIM else 'MISSED'}")
    told = {"rows": [asdict(one) for one in rows], "growth": growth, "ok": worst <= AIM, "cores": os.cpu_count()}
    print(json.dumps(told))


def grown(before: Row, after: Row) -> dict[str, float]:
    """How CPU grew, as for ten times the replicas."""
    tenfold = AIM / (after.replicas / before.replicas)
    pairs = {name: (getattr(before, f"{name}_cores"), getattr(after, f"{name}_cores")) for name in SERVERS}
    return {name: round(now / max(was, 1e-6) * tenfold, 2) for name, (was, now) in pairs.items()}


def show(one: Row) -> None:
    print(
        f"{one.replicas:5d} replicas: {one.groups_per_s:5.1f} groups/s; broker {one.broker_cores:.3f} cores, "
        f"{one.broker_ms_per_group:.2f} ms/group; controller {one.controller_ms_per_group:.2f} ms/group; "
        f"DCS {one.dcs_ms_per_version:.0f} ms/version; replicas {one.clients_cores:.2f} cores\n"
        f"      p50 {one.p50_ms} ms\n      p99 {one.p99_ms} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
