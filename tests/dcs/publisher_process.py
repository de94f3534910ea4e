"""A trainer's publisher as a process of its own, which may be killed in the middle of a broadcast."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch

from services.trainer.weights import WeightPublisher
from shared.config import loads
from shared.jetstream import Connection
from shared.kv import KV
from shared.registry import Registry
from shared.service import Context
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue
from tests.dcs.fake_engine import PROCESSES


class PublisherProcess:
    """`version = await publisher.publish(step, rows)`; then `settled()`, or `kill()`."""

    def __init__(self, url: str, config: bytes, model_dir: Path, name: str = "trainer-0") -> None:
        self._calls, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_serve, args=(url, config, str(model_dir), name, theirs), daemon=True)
        self._process.start()
        theirs.close()

    async def publish(self, step: int, rows: int = 1000) -> int:
        """The weights of `step`, of so many rows; returns their version, before they are sent."""
        return await self._call("publish", step, rows)

    async def settled(self) -> None:
        await self._call("settled")

    async def _call(self, *call: Any, deadline_s: float = 300.0) -> Any:
        def exchange() -> Any:
            self._calls.send(call)
            if not self._calls.poll(deadline_s):
                raise TimeoutError(f"{call[0]}: the publisher gave no answer within {deadline_s} s")
            return self._calls.recv()

        return await asyncio.to_thread(exchange)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)


def _serve(url: str, config: bytes, model_dir: str, name: str, calls: Pipe) -> None:
    torch.set_num_threads(1)
    asyncio.run(_publish(url, config, model_dir, name, calls))


async def _publish(url: str, config: bytes, model_dir: str, name: str, calls: Pipe) -> None:
    from tests.dcs.conftest import weights

    run = loads(config)
    subjects = Subjects(run.run)
    connection = await Connection.open(url, name=name, deadline_s=60)
    queue = TransferQueue(connection, subjects)
    kv = await KV.open(connection, subjects.config_bucket)
    registry = await Registry.open(connection, subjects, ttl_s=run.heartbeat_ttl_s)
    publisher = WeightPublisher(Context("trainer", name, run, connection, queue, kv, registry), Path(model_dir))
    while True:
        call, *arguments = await asyncio.to_thread(calls.recv)
        if call == "publish":
            step, rows = arguments
            calls.send(await publisher.publish(step, iter(weights(float(step), rows).items()), "update"))
        else:
            await publisher.settled()
            calls.send(None)
