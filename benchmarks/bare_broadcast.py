"""The baseline of benchmarks/weight_sync.py: `torch.distributed.broadcast` over gloo between processes that do nothing else."""

from __future__ import annotations

import multiprocessing
import socket
import time
from multiprocessing.connection import Connection as Pipe
from typing import Self

DEADLINE_S = 120.0


class Bare:
    """One sender and `receivers` receivers, each with a warm flat tensor of `nbytes`."""

    def __init__(self, receivers: int, nbytes: int, bucket_bytes: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(receivers + 1):
            here, there = spawn.Pipe()
            arguments = (rank, receivers + 1, port, nbytes, bucket_bytes, there)
            self._processes.append(spawn.Process(target=_rank, args=arguments, daemon=True))
            self._processes[-1].start()
            there.close()
            self._pipes.append(here)

    def __enter__(self) -> Self:
        for pipe in self._pipes:
            self._answer(pipe)
        for whole in (True, False):  # warm
            self._send(whole)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)

    def round(self) -> float:
        """Seconds until the slowest has all: whole or in buckets, whichever is faster."""
        return min(self._send(True), self._send(False))

    def _send(self, whole: bool) -> float:
        for pipe in self._pipes:
            pipe.send(whole)
        times = [self._answer(pipe) for pipe in self._pipes]
        return max(end for _, end in times) - times[0][0]

    def _answer(self, pipe: Pipe) -> tuple[float, float]:
        if not pipe.poll(DEADLINE_S):
            raise SystemExit(f"the bare broadcast gave no answer within {DEADLINE_S:g} s")
        return pipe.recv()


def _rank(rank: int, world_size: int, port: int, nbytes: int, bucket_bytes: int, pipe: Pipe) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=world_size, rank=rank)
    data = torch.full((nbytes,), rank, dtype=torch.uint8)
    pipe.send((0.0, 0.0))
    while True:
        try:
            whole = pipe.recv()
        except EOFError:
            return
        dist.barrier()
        started = time.monotonic()
        for part in [data] if whole else data.split(bucket_bytes):
            dist.broadcast(part, 0)
        pipe.send((started, time.monotonic()))
