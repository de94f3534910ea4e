"""An engine without a model: it takes weights as the light engine does (or, unstaged, as SGLang does) and can be made to fail.

The weights live in a process of its own that joins the real process group, so it can be killed and stopped like one.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from services.dcs import collective, segments
from services.dcs.digest import TensorSpec, digest, dtype_name, tensor_checksum
from services.rollout.engines.client import Checksums, EngineDead, EngineError, EngineTimeout

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["services.trainer.weights", "safetensors.torch"])


class Holder:
    """The weights, in the engine's process."""

    def __init__(self, folder: str) -> None:
        self.live = self.read(folder)
        self.staged: dict[str, torch.Tensor] = {}
        self.groups: dict[str, Any] = {}
        self.timeout_s = 0.0

    def read(self, folder: str) -> dict[str, torch.Tensor]:
        return {name: t for path in sorted(Path(folder).glob("*.safetensors")) for name, t in load_file(path).items()}

    def join(self, host: str, port: int, rank: int, world: int, name: str, backend: str, timeout_s: float) -> None:
        self.groups[name] = collective.join(host, port, world, rank, name, backend, timeout_s)
        self.timeout_s = timeout_s

    def leave(self, name: str) -> None:
        group = self.groups.pop(name, None)
        if group is not None:
            collective.leave(group)

    def receive(self, group: str, specs: list[tuple[str, str, tuple[int, ...]]], staged: bool, corrupt: bool) -> None:
        kinds = [(name, getattr(torch, dtype), shape) for name, dtype, shape in specs]
        sizes = [prod(shape) * dtype.itemsize for _, dtype, shape in kinds]
        bucket = torch.zeros(sum(sizes), dtype=torch.uint8)
        collective.broadcast(self.groups[group], bucket, time.monotonic() + self.timeout_s)
        if corrupt:
            bucket[0] ^= 1
        target = self.staged if staged else self.live
        for (name, dtype, shape), part in zip(kinds, bucket.split(sizes), strict=True):
            target[name] = part.view(dtype).view(shape)

    def take(self, specs: list[tuple[str, str, tuple[int, ...]]], segment: str, corrupt: bool) -> None:
        kinds = [(name, getattr(torch, dtype), shape) for name, dtype, shape in specs]
        sizes = [prod(shape) * dtype.itemsize for _, dtype, shape in kinds]
        bucket = torch.frombuffer(segments.attach(segment, sum(sizes)), dtype=torch.uint8)
        if corrupt:
            bucket[0] ^= 1
        for (name, dtype, shape), part in zip(kinds, bucket.split(sizes), strict=True):
            self.staged[name] = part.view(dtype).view(shape)

    def forget(self) -> None:
        self.live = {}

    def load(self, folder: str, staged: bool) -> None:
        (self.staged if staged else self.live).update(self.read(folder))

    def end(self, commit: bool) -> None:
        if commit:
            self.live.update(self.staged)
        self.staged = {}

    def checksums(self) -> tuple[dict[str, str], str]:
        shown = self.staged or self.live
        specs = [TensorSpec(n, dtype_name(t), tuple(t.shape), tensor_checksum(t)) for n, t in shown.items()]
        return {spec.name: spec.sha256 for spec in specs}, digest(specs)

    def value(self) -> float:
        return float(self.live["scale"])

    def value_or_nothing(self) -> float:
        return float(self.live.get("scale", torch.nan))


def _serve(folder: str, calls: Connection) -> None:
    torch.set_num_threads(1)
    holder = Holder(folder)
    while True:
        name, arguments = calls.recv()
        try:
            calls.send((getattr(holder, name)(*arguments), ""))
        except (collective.CollectiveError, segments.SegmentError) as error:
            calls.send((None, str(error)))


class FakeEngine:
    """What `EngineClient` offers to the receiver."""

    def __init__(self, folder: Path, staged: bool = True, verifiable: bool = True) -> None:
        self.staged, self.verifiable = staged, verifiable
        self._calls, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(target=_serve, args=(str(folder), theirs), daemon=True)
        self.process.start()
        theirs.close()
        self._turn = asyncio.Lock()
        self.log: list[str] = []
        """Calls in their order."""
        self.version = "default"
        self.paused = self.open = False
        self.asleep = False
        self.released: set[str] = set()
        self.corrupt = 0
        """How many of the next buckets get a wrong byte."""
        self.hold = asyncio.Event()
        """Cleared: the next bucket is not asked for until it is set."""
        self.hold.set()
        self.hold_at = 0
        """Which bucket of an update `hold` applies to; those before pass."""
        self.buckets = 0
        """Received since the update was opened."""

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def close(self) -> None:
        self.process.kill()
        self.process.join(10)

    async def _call(self, name: str, *arguments: Any, timeout_s: float = 120.0) -> Any:
        def exchange() -> Any:
            self._calls.send((name, arguments))
            if not self._calls.poll(timeout_s):
                raise EngineTimeout(504, f"{name}: no answer within {timeout_s} s")
            return self._calls.recv()

        async with self._turn:
            try:
                value, error = await asyncio.to_thread(exchange)
            except (EOFError, OSError) as gone:
                raise EngineDead(0, f"{name}: the engine is gone") from gone
        if error:
            raise EngineError(400, error)
        return value

    async def value(self) -> float:
        """What is served now."""
        return await self._call("value")

    async def server_info(self) -> dict[str, Any]:
        return {"staged_updates": self.staged}

    async def checksums(self, timeout_s: float = 30.0) -> Checksums:
        self.log.append("checksums")
        tensors, whole = await self._call("checksums")
        return Checksums(tensors if self.verifiable else {"qkv": "1"}, whole, self.staged)

    async def set_version(self, version: str, abort_all: bool = False) -> None:
        self.version = version

    async def pause(self, mode: str = "abort") -> None:
        self.log.append(f"pause {mode}")
        self.paused = True

    async def resume(self) -> None:
        self.log.append("resume")
        self.paused = False

    async def release_memory(self, tags: Iterable[str] = ()) -> None:
        """As of a GPU: what was released does not come back, and cannot be released twice."""
        assert self.paused
        assert not self.released & set(tags)
        self.released |= set(tags)
        self.log.append("release")
        await self._call("forget")
        self.asleep = True

    async def resume_memory(self, tags: Iterable[str] = ()) -> None:
        assert self.released >= set(tags)
        self.released -= set(tags)
        self.log.append("take")
        self.asleep = False
        await self._call("value_or_nothing")

    async def update_from_shared(
        self, tensors: Iterable[Any], segment: str, weight_version: str | None = None, timeout_s: float = 30.0
    ) -> None:
        assert self.open
        await self.hold.wait()
        self.log.append("shared")
        listed = [(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        corrupt, self.corrupt = self.corrupt > 0, max(0, self.corrupt - 1)
        await self._call("take", listed, segment, corrupt)

    async def begin_update(self) -> bool:
        if self.open:
            raise EngineError(400, "an update is open already")
        self.log.append("begin")
        self.open, self.buckets = True, 0
        return True

    async def end_update(self, commit: bool = True, weight_version: str | None = None, mode: str | None = None) -> bool:
        self.log.append("end" if commit else "drop")
        self.open = False
        if self.staged:
            await self._call("end", commit)
        if commit and weight_version:
            self.version = weight_version
        return True

    async def init_group(
        self, host: str, port: int, rank: int, world_size: int, group_name: str, backend: str, timeout_s: float
    ) -> None:
        self.log.append("join")
        await self._call("join", host, port, rank, world_size, group_name, backend, timeout_s, timeout_s=timeout_s + 5)

    async def destroy_group(self, group_name: str, timeout_s: float = 30.0) -> None:
        self.log.append("leave")
        await self._call("leave", group_name)

    async def update_from_distributed(
        self,
        tensors: Iterable[Any],
        group_name: str,
        *,
        bucket: bool = True,
        weight_version: str | None = None,
        flush_cache: bool = False,
        timeout_s: float = 30.0,
    ) -> None:
        assert not self.staged
        await self._receive(group_name, tensors, timeout_s)
        if weight_version:
            self.version = weight_version

    async def update_from_buckets(self, buckets: Sequence[tuple[str, Sequence[Any]]], timeout_s: float = 30.0) -> None:
        assert self.staged
        for group, tensors in buckets:
            await self._receive(group, tensors, timeout_s)

    async def _receive(self, group: str, tensors: Iterable[Any], timeout_s: float) -> None:
        assert self.open
        if self.buckets >= self.hold_at:
            await self.hold.wait()
        self.log.append("bucket")
        listed = [(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
        corrupt, self.corrupt = self.corrupt > 0, max(0, self.corrupt - 1)
        await self._call("receive", group, listed, self.staged, corrupt, timeout_s=timeout_s + 5)
        self.buckets += 1

    async def update_from_disk(
        self,
        folder: str,
        weight_version: str | None = None,
        *,
        flush_cache: bool = True,
        mode: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self.log.append("disk")
        await self._call("load", folder, self.staged)
        if weight_version and not self.staged:
            self.version = weight_version
