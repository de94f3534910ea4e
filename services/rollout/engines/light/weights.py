"""Weight updates: received and checked beside the running model, made live between two decode steps.

    begin_weight_update -> update_weights_from_distributed | _from_tensor | _from_disk (any number) -> end_weight_update

Owns the stage of the open update (stage.py) and the broadcast groups. Guarantees, held by tests/rollout/test_light_updates.py:
* what is received is not visible before `end(commit=True)`, and decoding goes on meanwhile;
* every tensor is checked for name, shape and dtype when it is announced, so that a commit cannot fail half-way
  (SGLang accepts unknown names silently);
* a failed transfer leaves the live weights and the staged ones as they were; the update stays open to be ended;
* transfers, checksums and the switch never overlap: they take turns in one thread.

Differences from SGLang: updates are staged, so no pause is needed; `from_tensor` takes safetensors bytes, not pickles;
checksums are sha256 of the tensors under their Hugging Face names, of the staged ones while an update holds any.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from services.dcs import collective
from services.dcs.digest import TensorSpec, digest, dtype_name, tensor_checksum
from services.rollout.engines.light.model import DTYPES, ModelError, Qwen3, read_tensors
from services.rollout.engines.light.scheduler import Mode, Scheduler
from services.rollout.engines.light.stage import Stage, Stager

T = TypeVar("T")
BUCKET = "flattened_bucket"


class UpdateError(RuntimeError):
    """An update that was refused or failed. Answered as HTTP 400."""


@dataclass(frozen=True, slots=True)
class Group:
    """A joined broadcast group."""

    group: dist.ProcessGroup
    backend: str
    timeout_s: float


class Weights:
    def __init__(self, model: Qwen3, scheduler: Scheduler) -> None:
        self.model = model
        self.scheduler = scheduler
        self.open = False
        self._stager = Stager()
        self._stage: Stage | None = None
        """Of the open update, once it has received something."""
        self._groups: dict[str, Group] = {}
        self._turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    async def close(self) -> None:
        """Take no more transfers. Groups, and a transfer that is stuck, end with the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._stager.close()

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
            stage, self._stage, self.open = self._stage, None, False
            if not commit:
                if stage is not None:
                    await self._in_thread(lambda: self._drop(stage))
                return 0
            # A client that goes away now has asked for the switch all the same.
            return await asyncio.shield(self._switch(stage, version, mode))

    async def _switch(self, stage: Stage | None, version: str | None, mode: Mode | None) -> int:
        """Make the stage live between two steps: all that takes time is done before."""
        if stage is not None:
            await self._in_thread(lambda: self._complete(stage))
            version = version or stage.version
        elif version is None:
            return 0

        def apply() -> None:
            if stage is not None:
                before, self.model.live = self.model.live, stage.tensors
                self._stager.give_back(before)

        return await asyncio.wrap_future(self.scheduler.call(lambda: self.scheduler.switch(apply, version, mode)))

    def _complete(self, stage: Stage) -> None:
        try:
            stage.settle()
            stage.tensors.fill_up(self.model.live, stage.specs)
        except BaseException:
            self._drop(stage)
            raise

    def _drop(self, stage: Stage) -> None:
        wait(stage.writing)
        self._stager.give_back(stage.tensors)

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

    async def _put(
        self, tensors: dict[str, torch.Tensor], version: str | None, bucket: torch.Tensor | None = None
    ) -> None:
        """Into the stage, which is written while the next ones are on their way."""
        self._stage = stage = self._stage or self._stager.open(self.model.live)
        if version is not None:
            stage.version = version
        await self._in_thread(lambda: self._stager.put(stage, tensors, bucket))

    # ---- broadcast groups

    async def join(
        self, host: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> None:
        """Join a broadcast group; returns when all ranks are there."""
        async with self._turn:
            if name in self._groups:
                raise UpdateError(f"group_name: {name!r} is joined already; destroy_weights_update_group first")

            def enter() -> None:
                # Recorded here, so that a join which its caller no longer waits for can still be left.
                group = collective.join(host, port, world_size, rank, name, backend, timeout_s)
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
            device = self.model.device if group.backend == "nccl" else torch.device("cpu")
            deadline = time.monotonic() + group.timeout_s

            def receive() -> tuple[list[torch.Tensor], torch.Tensor | None]:
                if not bucket:
                    return _receive_each(group.group, kinds, shapes, device, deadline), None
                sizes = [prod(shape) * kind.itemsize for shape, kind in zip(shapes, kinds, strict=True)]
                memory = self._stager.bucket(sum(sizes), device)
                collective.broadcast(group.group, memory, deadline)
                return _parts(memory, sizes, kinds, shapes), memory

            try:
                tensors, memory = await self._in_thread(receive)
            except collective.CollectiveError as error:
                raise UpdateError(str(error)) from error
            await self._put(dict(zip(names, tensors, strict=True)), version, memory)

    async def from_tensor(self, serialized: list[str], version: str | None) -> None:
        """Take tensors from safetensors bytes in base64: one string, or several that are taken in order."""
        async with self._transfer("update_weights_from_tensor"):
            tensors = await self._in_thread(lambda: _decode(serialized))
            self._check({name: list(tensor.shape) for name, tensor in tensors.items()})
            await self._put(tensors, version)

    async def from_disk(self, folder: Path, version: str | None, mode: Mode | None) -> int:
        """Load a Hugging Face folder: into the open update, or, without one, at once."""
        async with self._turn:
            try:
                tensors = dict(await self._in_thread(lambda: read_tensors(folder, self.model)))
            except ModelError as error:
                raise UpdateError(str(error)) from error
            await self._put(tensors, version)
            if self.open:
                return 0
            stage, self._stage = self._stage, None
            return await self._switch(stage, version, mode)

    def _check(self, shapes: dict[str, list[int]]) -> None:
        problems = [why for name, shape in shapes.items() if (why := self.model.check(name, tuple(shape)))]
        if problems:
            raise UpdateError("; ".join(problems[:5]))

    # ---- verification

    async def checksums(self) -> dict[str, Any]:
        """sha256 of each tensor and the digest of all: of the staged ones while an update holds any, else of the live ones."""
        async with self._turn:
            return await self._in_thread(self._checksums)

    def _checksums(self) -> dict[str, Any]:
        if self._stage is not None:
            self._stage.settle()
            specs = list(self._stage.specs.values())
        else:
            found = ((name, parameter.read()) for name, parameter in self.model.parameters.items())
            specs = [TensorSpec(name, dtype_name(t), tuple(t.shape), tensor_checksum(t)) for name, t in found]
        return {
            "checksums": {spec.name: spec.sha256 for spec in specs},
            "digest": digest(specs),
            "staged": self._stage is not None,
        }


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
                f"serialized_named_tensors[{index}]: not safetensors bytes in base64 ({error}); the light engine takes no pickles"
            ) from error
    return tensors
