"""How an engine receives weights: the same for the light engine and inside SGLang.

    begin_weight_update -> update_weights_from_distributed | _from_shared | _from_tensor | _from_disk (any number)
        -> end_weight_update

Owns the broadcast groups, and the turns that transfers, checksums and the switch take in one thread: they never overlap. Where
what was received is kept until then, and how it becomes live, is the engine's (light/weights.py, sglang/updates.py).
A transfer is any number of buckets, each from one group, which are received one after another without a word to anybody.
Guarantees, held for both by tests/contract/test_updates.py:
* every tensor of a transfer is checked for name, shape and dtype before anything of it is received, so that a commit cannot
  fail half-way;
* a failed transfer leaves what is live as it was; the update stays open to be ended;
* a transfer has one deadline, and ends with the bucket that is on its way when whoever asked for it has gone.
`from_tensor` takes safetensors bytes in base64, not pickles; `from_shared` takes a bucket that a trainer of this host keeps in
shared memory or in a GPU's (services/dcs/segments.py, device_memory.py), which is what trainer and engines on one device exchange
weights by.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TypeVar

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from services.dcs import collective, device_memory, segments
from services.dcs.digest import TensorSpec, dtype_name, tensor_checksum
from services.dcs.handles import Handle, Place

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


@dataclass(frozen=True, slots=True)
class Announced:
    """Tensors that lie in one bucket, one after another, and that the model can take."""

    names: list[str]
    kinds: list[torch.dtype]
    shapes: list[list[int]]

    @property
    def sizes(self) -> list[int]:
        """In bytes."""
        return [prod(shape) * kind.itemsize for shape, kind in zip(self.shapes, self.kinds, strict=True)]

    def of(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in `memory`."""
        tensors = []
        for part, kind, shape in zip(memory.split(self.sizes), self.kinds, self.shapes, strict=True):
            aligned = part if part.storage_offset() % kind.itemsize == 0 else part.clone()
            tensors.append(aligned.view(kind).view(shape))
        return dict(zip(self.names, tensors, strict=True))

    def cut(self, counts: list[int]) -> list[Announced]:
        """So many of them each."""
        ends = list(accumulate(counts))
        return [
            Announced(self.names[start:end], self.kinds[start:end], self.shapes[start:end])
            for start, end in zip([0, *ends], ends, strict=False)
        ]


class Receiving(ABC):
    """The receiving side of one engine's updates. `device` is where NCCL delivers; `rank` the engine's rank among its own."""

    def __init__(self, device: torch.device, rank: int = 0) -> None:
        self.open = False
        self._device, self._rank = device, rank
        self._groups: dict[str, Group] = {}
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._unwanted = threading.Event()
        """Nobody waits for what the thread is at."""

    async def close(self) -> None:
        """Take no more transfers. Groups, and a bucket that is stuck, end with the process."""
        self._unwanted.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- the engine's part

    @abstractmethod
    def check(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Why a tensor cannot be loaded under this name, or None."""

    @abstractmethod
    def _put(self, tensors: dict[str, torch.Tensor], version: str | None, bucket: torch.Tensor | None = None) -> None:
        """Keep what was received until the switch. Those that lie in a `bucket` came in it. Called in the thread."""

    def _memory(self, size: int, device: torch.device) -> torch.Tensor:
        """Flat memory for a bucket."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def _landed(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a broadcast brought, where it waits for the switch. Called in the thread."""
        return tensors

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
        """In turn. Whoever is cancelled keeps the turn until the thread is free."""
        self._unwanted = unwanted = threading.Event()
        job = asyncio.get_running_loop().run_in_executor(self._thread, function)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            unwanted.set()
            await asyncio.gather(job, return_exceptions=True)
            raise

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
        buckets: list[tuple[str, int]],
        flat: bool,
        version: str | None,
        timeout_s: float | None,
    ) -> None:
        """Receive what rank 0 of each bucket's group broadcasts: (group, number of tensors) in the order of sending. Tensors
        come all concatenated in one uint8 bucket (`flat`) or each by itself. `timeout_s` is the deadline of all of it, by
        default that of the bucket's group."""
        async with self._transfer("update_weights_from_distributed"):
            groups = [self._joined(name) for name, _ in buckets]
            announced = self._announced(names, dtypes, shapes)
            counts = [count for _, count in buckets]
            if sum(counts) != len(names):
                raise UpdateError(f"buckets: of {sum(counts)} tensors, but names has {len(names)}")
            wanted = list(zip(groups, announced.cut(counts), strict=True))
            await self._in_thread(lambda: self._receive(wanted, flat, version, timeout_s))

    def _joined(self, name: str) -> Group:
        group = self._groups.get(name)
        if group is None:
            raise UpdateError(f"group_name: {name!r} is not joined; joined are {sorted(self._groups)}")
        return group

    def _receive(
        self, wanted: list[tuple[Group, Announced]], flat: bool, version: str | None, timeout_s: float | None
    ) -> None:
        started, unwanted = time.monotonic(), self._unwanted
        for number, (group, announced) in enumerate(wanted, start=1):
            if unwanted.is_set():
                raise UpdateError(f"given up before bucket {number} of {len(wanted)}: nobody waits for it any more")
            deadline = started + (group.timeout_s if timeout_s is None else timeout_s)
            device = self._device if group.backend == "nccl" else torch.device("cpu")
            try:
                tensors, memory = self._receive_one(group, announced, flat, device, deadline)
            except collective.CollectiveError as error:
                raise UpdateError(f"bucket {number} of {len(wanted)}: {error}") from error
            self._put(self._landed(tensors), version if number == len(wanted) else None, memory)

    def _receive_one(
        self, group: Group, announced: Announced, flat: bool, device: torch.device, deadline: float
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        """The tensors, and the bucket that they lie in if they came in one."""
        if flat:
            memory = self._memory(sum(announced.sizes), device)
            collective.broadcast(group.group, memory, deadline)
            return announced.of(memory), memory
        tensors = {
            name: torch.empty(shape, dtype=kind, device=device)
            for name, shape, kind in zip(announced.names, announced.shapes, announced.kinds, strict=True)
        }
        for tensor in tensors.values():
            collective.broadcast(group.group, tensor, deadline)
        return tensors, None

    async def from_shared(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], segment: Place, version: str | None
    ) -> None:
        """Take a bucket, in which all tensors lie one after another, out of memory that the trainer shares."""
        async with self._transfer("update_weights_from_shared"):
            announced = self._announced(names, dtypes, shapes)

            def take() -> None:
                memory = _shared(segment, sum(announced.sizes))
                self._put(announced.of(memory), version)

            try:
                await self._in_thread(take)
            except segments.SegmentError as error:
                raise UpdateError(f"segment: {error}") from error

    async def from_tensor(self, serialized: list[str], version: str | None) -> None:
        """Take tensors from safetensors bytes in base64: one string, or several that are taken in order."""

        def take() -> None:
            tensors = _decode(serialized)
            self._check({name: list(tensor.shape) for name, tensor in tensors.items()})
            self._put(tensors, version)

        async with self._transfer("update_weights_from_tensor"):
            await self._in_thread(take)

    def _announced(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> Announced:
        """Raises UpdateError if the model cannot take one of them."""
        if not len(names) == len(dtypes) == len(shapes):
            raise UpdateError(
                f"names, dtypes, shapes: {len(names)}, {len(dtypes)} and {len(shapes)} entries; one of each a tensor"
            )
        kinds = [_dtype(name, dtype) for name, dtype in zip(names, dtypes, strict=True)]
        self._check(dict(zip(names, shapes, strict=True)))
        return Announced(names, kinds, shapes)

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


def _shared(segment: Place, size: int) -> torch.Tensor:
    """A bucket of somebody else's. Raises SegmentError."""
    if isinstance(segment, str):
        return torch.frombuffer(segments.attach(segment, size), dtype=torch.uint8)
    return device_memory.take(Handle.read(segment), size)


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
