"""A trainer's process and a light engine's on one device: what the one offers in memory the other takes, and it is given back.

On a CPU through shared memory, on a GPU by CUDA IPC: `python -m pytest -m cuda tests/dcs`. The latter has not been run yet.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from services.dcs import segments
from services.dcs.digest import TensorSpec
from services.rollout.engines.client import EngineClient
from services.rollout.engines.process import EngineProcess
from tests.rollout import tiny

DEADLINE_S = 300.0
ON_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


@dataclass
class Trainer:
    process: Process
    device: str
    prefix: str
    offer: dict[str, Any]
    """Its digest and buckets."""

    async def unshare(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"unshare\n")
        told = await answer(self.process)
        assert told["held"] == 0, "the device's memory is given back"
        assert list(segments.FOLDER.glob(f"{self.prefix}*")) == []

    def bucket(self, number: int) -> tuple[list[TensorSpec], Any]:
        """Its tensors, and where it lies."""
        bucket, specs = self.offer["buckets"][number], self.offer["specs"]
        listed = [specs[index] for index in bucket["indices"]]
        return [TensorSpec(name, dtype, tuple(shape), sha256) for name, dtype, shape, sha256 in listed], bucket["place"]


async def answer(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
    assert line, "the trainer's process has ended"
    return json.loads(line)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The weights that an engine starts on, and other ones."""
    made = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    for seed, folder in enumerate(made):
        tiny.build(folder, seed=seed)
    return made


@pytest.fixture(params=DEVICES)
async def trainer(request: pytest.FixtureRequest, folders: tuple[Path, Path]) -> AsyncIterator[Trainer]:
    device, prefix = request.param, segments.prefix(uuid.uuid4().hex, "/runs")
    command = [sys.executable, "-m", "tests.dcs.sharing_process", str(folders[1]), device, prefix]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, cwd=Path(__file__).parents[2])
    try:
        yield Trainer(process, device, prefix, await answer(process))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        segments.sweep(prefix)


@pytest.fixture
async def started(trainer: Trainer, folders: tuple[Path, Path]) -> AsyncIterator[tuple[EngineProcess, EngineClient]]:
    async with AsyncExitStack() as stack:
        process = await EngineProcess.start("light", folders[0], {"device": trainer.device, "dtype": "float32"})
        stack.push_async_callback(process.stop)
        yield process, await stack.enter_async_context(EngineClient(process.url))


async def test_an_engine_takes_what_a_trainer_offers(
    trainer: Trainer, started: tuple[EngineProcess, EngineClient]
) -> None:
    _, engine = started
    assert len(trainer.offer["buckets"]) > 1
    assert (await engine.checksums()).digest != trainer.offer["digest"]
    await engine.begin_update()
    for number in range(len(trainer.offer["buckets"])):
        await engine.update_from_shared(*trainer.bucket(number), "2")
    staged = await engine.checksums()
    assert staged.staged
    assert staged.digest == trainer.offer["digest"]
    await engine.end_update()
    await trainer.unshare()
    live = await engine.checksums()
    assert not live.staged
    assert live.digest == trainer.offer["digest"]


async def test_memory_comes_back_although_an_engine_died_with_it(
    trainer: Trainer, started: tuple[EngineProcess, EngineClient]
) -> None:
    process, engine = started
    await engine.begin_update()
    await engine.update_from_shared(*trainer.bucket(0), "2")
    await process.stop()
    await trainer.unshare()


async def test_memory_comes_back_although_nobody_took_it(trainer: Trainer) -> None:
    if trainer.device != "cpu":
        assert trainer.offer["held"] > 0
    await trainer.unshare()
