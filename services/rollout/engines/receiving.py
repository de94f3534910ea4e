"""How an engine receives weights: the same for the light engine and inside SGLang.

    begin_weight_update -> update_weights_from_distributed | _from_shared | _from_tensor | _from_disk (any number)
        -> end_weight_update

Owns the broadcast groups, and the turns that transfers, checksums and the switch take in one thread: they never overlap. Where
what was received is kept until then, and how it becomes live, is the engine's (light/weights.py, sglang/updates.py).
Guarantees, held for both by tests/contract/test_updates.py:
* every tensor is checked for name, shape and dtype when it is announced, so that a commit cannot fail half-way;
* a failed transfer leaves what was received before as it was; the update stays open to be ended.
`from_tensor` takes safetensors bytes in base64, not pickles; `from_shared` takes a bucket that a trainer of this host keeps in
shared memory (services/dcs/segments.py), which is what trainer and engines on one device exchange weights by.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from services.dcs import collective, segments
from services.dcs.digest import TensorSpec, dtype_name, tensor_checksum

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UpdateError(RuntimeError):
    """An update that was refused or failed. Answered as HTTP 400."""


@dataclass(frozen=True, slots=True)
class Group:
    """A joined broadcast group."""

    group: dist.ProcessGroup
    backend: str
    timeout_s: float


class Receiving(ABC):
    """The receiving side of one engine's updates. `device` is where NCCL delivers; `rank` the engine's rank among its own."""

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        self.open = False
        self._device, self._rank = device, rank
        self._groups: dict[str, Group] = {}
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    async def close(self) -> None:
        """Take no more transfers. Groups, and a transfer that is stuck, end with the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- the engine's part

    @abstractmethod
    def check(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Why a tensor cannot be loaded under this name, or None."""

    @abstractmethod
    async def _put(
        self, tensors: dict[str, torch.Tensor], version: str | None, bucket: torch.Tensor | None = None
    ) -> None:
        """Keep what was received until the switch. Those that lie in a `bucket` came in it."""

    def _memory(self, size: int, device: torch.device) -> torch.Tensor:
        """Flat memory for a bucket."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    # ---- the update

    async def begin(self) -> None:
        async with self._turn:
            if self.open:
                raise UpdateError(
                    "a weight update is open already: end it first with end_weight_update (commit false drops it)"
                )
            self.open = True

    def _need_open(self, call: str) -> None:
        if not self.open:
            raise UpdateError(f"{call}: no weight update is open; call begin_weight_update first")

    @asynccontextmanager
    async def _transfer(self, call: str) -> AsyncIterator[None]:
        async with self._turn:
            self._need_open(call)
            yield

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    # ---- broadcast groups

    async def join(
        self, host: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> None:
        """Join a broadcast group; returns when all ranks are there. `rank` is that of this engine's first."""
        async with self._turn:
            if name in self._groups:
                raise UpdateError(f"group_name: {name!r} is joined already; destroy_weights_update_group first")

            def enter() -> None:
                # Recorded here, so that a join which its caller no longer waits for can still be left.
                group = collective.join(host, port, world_size, rank + self._rank, name, backend, timeout_s)
                self._groups[name] = Group(group, backend, timeout_s)

            try:
                await self._in_thread(enter)
            except collective.CollectiveError as error:
                raise UpdateError(str(error)) from error

    async def leave(self, name: str) -> None:
        async with self._turn:
            group = self._groups.pop(name, None)
            if group is None:
                raise UpdateError(f"group_name: {name!r} is not joined; joined are {sorted(self._groups)}")
            await self._in_thread(lambda: collective.leave(group.group))

    # ---- transfers

    async def from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        bucket: bool,
        version: str | None,
    ) -> None:
        """Receive tensors broadcast by rank 0, each by itself or all concatenated in one uint8 bucket."""
        async with self._transfer("update_weights_from_distributed"):
            group = self._groups.get(group_name)
            if group is None:
                raise UpdateError(f"group_name: {group_name!r} is not joined; joined are {sorted(self._groups)}")
            kinds = self._kinds(names, dtypes, shapes)
            try:
                tensors, memory = await self._in_thread(lambda: self._receive(group, kinds, shapes, bucket))
            except collective.CollectiveError as error:
                raise UpdateError(str(error)) from error
            await self._put(dict(zip(names, tensors, strict=True)), version, memory)

    def _receive(
        self, group: Group, kinds: list[torch.dtype], shapes: list[list[int]], bucket: bool
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The tensors, and the bucket that they lie in if they came in one."""
        device = self._device if group.backend == "nccl" else torch.device("cpu")
        deadline = time.monotonic() + group.timeout_s
        if bucket:
            sizes = _sizes(kinds, shapes)
            memory = self._memory(sum(sizes), device)
            collective.broadcast(group.group, memory, deadline)
            return _parts(memory, sizes, kinds, shapes), memory
        tensors = [torch.empty(shape, dtype=kind, device=device) for shape, kind in zip(shapes, kinds, strict=True)]
        for tensor in tensors:
            collective.broadcast(group.group, tensor, deadline)
        return tensors, None

    async def from_shared(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], segment: str, version: str | None
    ) -> None:
        """Take a bucket, in which all tensors lie one after another, out of shared memory."""
        async with self._transfer("update_weights_from_shared"):
            kinds = self._kinds(names, dtypes, shapes)
            sizes = _sizes(kinds, shapes)

            def attach() -> list[torch.Tensor]:
                memory = torch.frombuffer(segments.attach(segment, sum(sizes)), dtype=torch.uint8)
                return _parts(memory, sizes, kinds, shapes)

            try:
                tensors = await self._in_thread(attach)
            except segments.SegmentError as error:
                raise UpdateError(f"segment: {error}") from error
            await self._put(dict(zip(names, tensors, strict=True)), version)

    async def from_tensor(self, serialized: list[str], version: str | None) -> None:
        """Take tensors from safetensors bytes in base64: one string, or several that are taken in order."""
        async with self._transfer("update_weights_from_tensor"):
            tensors = await self._in_thread(lambda: _decode(serialized))
            self._check({name: list(tensor.shape) for name, tensor in tensors.items()})
            await self._put(tensors, version)

    def _kinds(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> list[torch.dtype]:
        """The dtypes of tensors that are announced and can be loaded. Raises UpdateError."""
        if not len(names) == len(dtypes) == len(shapes):
            raise UpdateError(
                f"names, dtypes, shapes: {len(names)}, {len(dtypes)} and {len(shapes)} entries; one of each a tensor"
            )
        kinds = [_dtype(name, dtype) for name, dtype in zip(names, dtypes, strict=True)]
        self._check(dict(zip(names, shapes, strict=True)))
        return kinds

    def _check(self, shapes: dict[str, list[int]]) -> None:
        problems = [why for name, shape in shapes.items() if (why := self.check(name, tuple(shape)))]
        if problems:
            raise UpdateError("; ".join(problems[:5]))


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """What identifies a tensor."""
    return TensorSpec(name, dtype_name(tensor), tuple(tensor.shape), tensor_checksum(tensor))


def _dtype(name: str, dtype: str) -> torch.dtype:
    kind = DTYPES.get(dtype.removeprefix("torch."))
    if kind is None:
        raise UpdateError(f"dtypes: {name} has {dtype!r}; known are {', '.join(DTYPES)}")
    return kind


def _sizes(kinds: list[torch.dtype], shapes: list[list[int]]) -> list[int]:
    """In bytes."""
    return [prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]


def _parts(
    bucket: torch.Tensor, sizes: list[int], kinds: list[torch.dtype], shapes: list[list[int]]
) -> list[torch.Tensor]:
    """The tensors in a bucket, whose bytes follow each other without gaps."""
    tensors = []
    for part, kind, shape in zip(bucket.split(sizes), kinds, shapes, strict=True):
        aligned = part if part.storage_offset() % kind.itemsize == 0 else part.clone()
        tensors.append(aligned.view(kind).view(shape))
    return tensors


def _decode(serialized: list[str]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for index, text in enumerate(serialized):
        try:
            tensors.update(safetensors.torch.load(base64.b64decode(text, validate=True)))
        except (binascii.Error, SafetensorError, ValueError) as error:
            raise UpdateError(
                f"serialized_named_tensors[{index}]: not safetensors bytes in base64 ({error}); the engine takes no pickles"
            ) from error
    return tensors
