"""Trajectories per second through the TransferQueue, beside plain nats-py and Redis streams in the same run.

    python -m benchmarks.transfer_queue [--rounds 5]

2,000 trajectories of 2,048 tokens (ids, log-probabilities, mask, reward; 18 KB each) from 2 producer processes to 1 consumer
process, which decodes all of them to numpy and checks what it got; file storage; acknowledged on both sides. The systems:

    transfer_queue   groups of 8 as `Group` records through TransferQueue: publish, pull, confirmed acks; uvloop, as the services
    nats_py          what a plain user of nats-py writes: one trajectory a message, publish_async, fetch(64), ack
    nats_py_await    the same with an awaited publish a message
    nats_py_groups   publish_async of 8 trajectories a message, on uvloop: how much of the gain is only the grouping
    redis            Redis streams with an append-only file synced every second: XADD in pipelines of 8, XREADGROUP, XACK, XDEL

The baseline of `ratio_vs_nats_py` is the better of nats_py and nats_py_await. All plain systems carry one msgpack map of raw
columns a trajectory, the cheapest format there is. Rounds alternate between the systems. Of the rates the best round counts,
since other load only slows; of CPU times the median. Latency is taken in a round of its own, paced at 100 trajectories a second.
CPU is that of all processes, the server's included. The last line is JSON. Aim: at least twice plain nats-py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np
import psutil

from benchmarks.queues import SYSTEMS, Work, consume, produce
from shared.broker import EmbeddedBroker

TRAJECTORIES, TOKENS, GROUP, PRODUCERS = 2000, 2048, 8, 2
TRAJECTORY_BYTES = TOKENS * 9 + 4
PACED, PACED_PER_S = 400, 100.0
AIM = 2.0


@dataclass(slots=True)
class Result:
    """One system's rounds."""

    per_s: list[float] = field(default_factory=list)
    client_us: list[float] = field(default_factory=list)
    server_us: list[float] = field(default_factory=list)
    latencies_ms: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return max(self.per_s)

    @property
    def cpu_us(self) -> float:
        return statistics.median(a + b for a, b in zip(self.client_us, self.server_us, strict=True))


@contextmanager
def redis_server(folder: Path) -> Iterator[tuple[str, int]]:
    """A private server: (url, pid)."""
    binary = shutil.which("redis-server")
    if binary is None:
        sys.exit("redis-server is not installed, and the comparison needs it: `apt-get install redis-server`")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "port": port,
        "bind": "127.0.0.1",
        "dir": folder,
        "save": "",
        "appendonly": "yes",
        "appendfsync": "everysec",
    }
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    process = subprocess.Popen([binary, *arguments], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"redis-server does not listen on port {port}")
                time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(10)


def worker(work: Work, role: str, pipe: Pipe) -> None:
    """A producer or the consumer: connects, says so, waits for the start, works, and reports its CPU time."""

    async def ready() -> None:
        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)

    if SYSTEMS[work.system].uvloop:
        import uvloop

        uvloop.install()
    pipe.send(asyncio.run(consume(work, ready) if role == "consumer" else produce(work, ready)))


def one_round(work: Work, server_pid: int, result: Result) -> None:
    """All processes of one system, from the start signal to the last decoded trajectory."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for role, share in [("consumer", 0), *(("producer", i) for i in range(PRODUCERS))]:
        here, there = spawn.Pipe()
        processes.append(spawn.Process(target=worker, args=(work.of(share), role, there), daemon=True))
        pipes.append(here)
        processes[-1].start()
        there.close()
        here.recv()
    server = psutil.Process(server_pid)
    before, started = sum(server.cpu_times()[:2]), time.time()
    for pipe in pipes:
        pipe.send("go")
    consumed, *produced = [pipe.recv() for pipe in pipes]
    server_s = sum(server.cpu_times()[:2]) - before
    for process in processes:
        process.join()
    if work.per_s:
        result.latencies_ms += [1e3 * latency for latency in consumed.latencies]
    else:
        result.per_s.append(work.total / (consumed.finished - started))
        result.client_us.append(1e6 * (consumed.cpu_s + sum(each.cpu_s for each in produced)) / work.total)
        result.server_us.append(1e6 * server_s / work.total)


def measure(rounds: int) -> dict[str, Result]:
    results = {name: Result() for name in SYSTEMS}
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        (Path(folder) / "redis").mkdir()
        with (
            redis_server(Path(folder) / "redis") as (redis_url, redis_pid),
            EmbeddedBroker(Path(folder) / "nats") as broker,
        ):
            for number in range(rounds + 2):  # the first warms up and is not counted, the last is paced
                paced = number == rounds + 1
                total = PACED if paced else TRAJECTORIES
                for name in SYSTEMS:
                    url, pid = (redis_url, redis_pid) if name == "redis" else (broker.url, broker.pid)
                    work = Work(name, url, f"b{number}", total, TOKENS, GROUP, PRODUCERS, PACED_PER_S if paced else 0.0)
                    one_round(work, pid, results[name] if number else Result())
    return results


def report(results: dict[str, Result]) -> dict[str, float]:
    baseline = max(results["nats_py"].rate, results["nats_py_await"].rate)
    print(
        f"{TRAJECTORIES} trajectories of {TOKENS} tokens, {PRODUCERS} producers, 1 consumer; best rate, median CPU of the rounds"
    )
    print(
        f"{'':16}{'traj/s':>8}{'(min-max)':>16}{'MB/s':>7}{'ratio':>7}{'CPU us':>8}{'client':>8}{'server':>8}"
        f"{'p50 ms':>8}{'p99 ms':>8}"
    )
    for name, result in results.items():
        p50, p99 = np.percentile(result.latencies_ms, [50, 99])
        span = f"({min(result.per_s):.0f}-{max(result.per_s):.0f})"
        print(
            f"{name:16}{result.rate:8.0f}{span:>16}{result.rate * TRAJECTORY_BYTES / 1e6:7.1f}{result.rate / baseline:7.2f}"
            f"{result.cpu_us:8.0f}{statistics.median(result.client_us):8.0f}{statistics.median(result.server_us):8.0f}"
            f"{p50:8.2f}{p99:8.2f}"
        )
    ours = results["transfer_queue"]
    plain_cpu = min(results["nats_py"].cpu_us, results["nats_py_await"].cpu_us)
    return {
        "trajectories_per_s": round(ours.rate, 1),
        "mb_per_s": round(ours.rate * TRAJECTORY_BYTES / 1e6, 1),
        "ratio_vs_nats_py": round(ours.rate / baseline, 2),
        "ratio_vs_nats_py_groups": round(ours.rate / results["nats_py_groups"].rate, 2),
        "ratio_vs_redis": round(ours.rate / results["redis"].rate, 2),
        "cpu_us_per_trajectory": round(ours.cpu_us, 1),
        "cpu_ratio_vs_nats_py": round(plain_cpu / ours.cpu_us, 2),
        "p50_ms": round(float(np.percentile(ours.latencies_ms, 50)), 2),
        "p99_ms": round(float(np.percentile(ours.latencies_ms, 99)), 2),
        "aim": AIM,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    print(json.dumps(report(measure(parser.parse_args().rounds))))


if __name__ == "__main__":
    main()
