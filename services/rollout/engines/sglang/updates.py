"""Weight updates inside SGLang: received and checked beside the running model, made live between two decode steps.

    begin_weight_update -> update_weights_from_distributed | _from_tensor | _from_disk (any number) -> end_weight_update

Owns the staged tensors of the open update and the broadcast groups; the model itself is the `Target`'s (target.py). Guarantees,
the light engine's, held for both by tests/contract/test_updates.py:
* what is received is not visible before `end(commit=True)`, and decoding goes on meanwhile;
* every tensor is checked for name, shape and dtype when it is announced, so that a commit cannot fail half-way
  (SGLang by itself accepts unknown names silently);
* a failed transfer leaves the live weights and the staged ones as they were; the update stays open to be ended;
* transfers, checksums and the switch never overlap: they take turns, and the work is done in one thread.

Differences from bare SGLang: updates are staged, so no pause is needed; `from_tensor` takes safetensors bytes, not pickles;
checksums are sha256 of the tensors under their Hugging Face names, of the staged ones while an update holds any.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from services.dcs import collective
from services.dcs.digest import TensorSpec, digest, dtype_name, tensor_checksum
from services.rollout.engines.update_routes import Mode

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UpdateError(RuntimeError):
    """An update that was refused or failed. Answered as HTTP 400."""


class Target(Protocol):
    """The model that the weights are for."""

    device: torch.device
    """Where it computes, and where NCCL delivers."""
    stage: torch.device
    """Where tensors that came by NCCL wait for the switch."""
    rank: int
    """Among the engine's own ranks: each is a member of the broadcast group."""

    def check(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Why a tensor cannot be loaded under this name, or None."""

    def read(self, folder: Path) -> dict[str, torch.Tensor]:
        """The weights of a Hugging Face folder, all of them. Raises UpdateError."""

    async def switch(self, tensors: dict[str, torch.Tensor], version: str | None, mode: Mode | None) -> int:
        """Make them live between two decode steps. Returns how many running requests that met."""

    async def live(self) -> list[TensorSpec]:
        """What the model holds."""


@dataclass(frozen=True, slots=True)
class Group:
    """A joined broadcast group."""

    group: dist.ProcessGroup
    backend: str
    timeout_s: float


class Weights:
    """One engine's updates."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.open = False
        self.served: str | None = None
        """The version of the last switch."""
        self._staged: dict[str, torch.Tensor] = {}
        self._version: str | None = None
        self._groups: dict[str, Group] = {}
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    async def close(self) -> None:
        """Take no more transfers. Groups, and a transfer that is stuck, end with the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- the update

    async def begin(self) -> None:
        async with self._turn:
            if self.open:
                raise UpdateError(
                    "a weight update is open already: end it first with end_weight_update (commit false drops it)"
                )
            self.open = True

    async def end(self, commit: bool, version: str | None, mode: Mode | None) -> int:
        """Make the staged tensors live, or drop them. Returns how many running requests the switch met."""
        async with self._turn:
            self._need_open("end_weight_update")
            staged, staged_version = self._staged, self._version
            self.open, self._staged, self._version = False, {}, None
            if not commit:
                return 0
            # A client that goes away now has asked for the switch all the same.
            return await asyncio.shield(self._switch(staged, version or staged_version, mode))

    async def _switch(self, staged: dict[str, torch.Tensor], version: str | None, mode: Mode | None) -> int:
        if not staged and version is None:
            return 0
        met = await self.target.switch(staged, version, mode)
        self.served = version or self.served
        return met

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

    def _stage(self, tensors: dict[str, torch.Tensor], version: str | None) -> None:
        self._staged.update(tensors)
        if version is not None:
            self._version = version

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
                group = collective.join(host, port, world_size, rank + self.target.rank, name, backend, timeout_s)
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
            if not len(names) == len(dtypes) == len(shapes):
                raise UpdateError(
                    f"names, dtypes, shapes: {len(names)}, {len(dtypes)} and {len(shapes)} entries; one of each a tensor"
                )
            kinds = [_dtype(name, dtype) for name, dtype in zip(names, dtypes, strict=True)]
            self._check(dict(zip(names, shapes, strict=True)))
            receive = _receive_bucket if bucket else _receive_each
            device = self.target.device if group.backend == "nccl" else torch.device("cpu")
            deadline = time.monotonic() + group.timeout_s

            def transfer() -> list[torch.Tensor]:
                received = receive(group.group, kinds, shapes, device, deadline)
                return [tensor.to(self.target.stage) for tensor in received] if group.backend == "nccl" else received

            try:
                tensors = await self._in_thread(transfer)
            except collective.CollectiveError as error:
                raise UpdateError(str(error)) from error
            self._stage(dict(zip(names, tensors, strict=True)), version)

    async def from_tensor(self, serialized: list[str], version: str | None) -> None:
        """Take tensors from safetensors bytes in base64: one string, or several that are taken in order."""
        async with self._transfer("update_weights_from_tensor"):
            tensors = await self._in_thread(lambda: _decode(serialized))
            self._check({name: list(tensor.shape) for name, tensor in tensors.items()})
            self._stage(tensors, version)

    async def from_disk(self, folder: Path, version: str | None, mode: Mode | None) -> int:
        """Load a Hugging Face folder: into the open update, or, without one, at once."""
        async with self._turn:
            tensors = await self._in_thread(lambda: self.target.read(folder))
            if self.open:
                self._stage(tensors, version)
                return 0
            return await self._switch(tensors, version, mode)

    def _check(self, shapes: dict[str, list[int]]) -> None:
        problems = [why for name, shape in shapes.items() if (why := self.target.check(name, tuple(shape)))]
        if problems:
            raise UpdateError("; ".join(problems[:5]))

    # ---- verification

    async def checksums(self) -> dict[str, Any]:
        """sha256 of each tensor and the digest of all: of the staged ones while an update holds any, else of the live ones."""
        async with self._turn:
            staged = dict(self._staged)
            specs = await self._in_thread(lambda: specs_of(staged)) if staged else await self.target.live()
        return {
            "checksums": {spec.name: spec.sha256 for spec in specs},
            "digest": digest(specs),
            "staged": bool(staged),
        }


def specs_of(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """What identifies these tensors."""
    return [
        TensorSpec(name, dtype_name(tensor), tuple(tensor.shape), tensor_checksum(tensor))
        for name, tensor in tensors.items()
    ]


def _dtype(name: str, dtype: str) -> torch.dtype:
    kind = DTYPES.get(dtype.removeprefix("torch."))
    if kind is None:
        raise UpdateError(f"dtypes: {name} has {dtype!r}; known are {', '.join(DTYPES)}")
    return kind


def _receive_each(
    group: dist.ProcessGroup, kinds: list[torch.dtype], shapes: list[list[int]], device: torch.device, deadline: float
) -> list[torch.Tensor]:
    tensors = [torch.empty(shape, dtype=kind, device=device) for shape, kind in zip(shapes, kinds, strict=True)]
    for tensor in tensors:
        collective.broadcast(group, tensor, deadline)
    return tensors


def _receive_bucket(
    group: dist.ProcessGroup, kinds: list[torch.dtype], shapes: list[list[int]], device: torch.device, deadline: float
) -> list[torch.Tensor]:
    """The tensors' bytes follow each other without gaps."""
    sizes = [prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
    bucket = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    collective.broadcast(group, bucket, deadline)
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
