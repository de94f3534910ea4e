"""Weight updates: received and checked beside the running model, made live between two decode steps.

    begin_weight_update -> update_weights_from_distributed | _from_tensor | _from_disk (any number) -> end_weight_update

The receiving is receiving.py's. Owns the stage of the open update (stage.py). Guarantees, beside those of receiving.py, held by
tests/rollout/test_light_updates.py:
* what is received is not visible before `end(commit=True)`, and decoding goes on meanwhile;
* a failed transfer leaves the live weights as they were;
* released weights take no memory, and the update after that has to bring all of them; it costs no second copy.

Differences from SGLang: updates are staged, so no pause is needed; unknown names are refused, where it answers success;
checksums are sha256 of the tensors under their Hugging Face names, of the staged ones while an update holds any.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch

from services.dcs.digest import digest
from services.rollout.engines.light.model import ModelError, Qwen3, read_tensors
from services.rollout.engines.light.scheduler import Mode, Scheduler
from services.rollout.engines.light.stage import Stage, Stager
from services.rollout.engines.receiving import Receiving, UpdateError, spec_of


class Weights(Receiving):
    def __init__(self, model: Qwen3, scheduler: Scheduler) -> None:
        super().__init__(model.device)
        self.model = model
        self.scheduler = scheduler
        self._stager = Stager()
        self._stage: Stage | None = None
        """Of the open update, once it has received something."""

    async def close(self) -> None:
        await super().close()
        self._stager.close()

    def check(self, name: str, shape: tuple[int, ...]) -> str | None:
        return self.model.check(name, shape)

    def _memory(self, size: int, device: torch.device) -> torch.Tensor:
        return self._stager.bucket(size, device)

    def _receive(self, *arguments: Any) -> None:
        with self._stager.receiving():
            super()._receive(*arguments)

    # ---- the update

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
            if self.model.live.hollow:
                self._need_all(stage)
            stage.tensors.fill_up(self.model.live, stage.specs)
        except BaseException:
            self._drop(stage)
            raise

    def _need_all(self, stage: Stage) -> None:
        if missing := [name for name in self.model.parameters if name not in stage.specs]:
            raise UpdateError(
                f"the weights were released, so an update has to bring all of them; {len(missing)} are missing, "
                f"{missing[0]} first"
            )

    def _drop(self, stage: Stage) -> None:
        wait([job for job, _ in stage.writing])
        self._stager.give_back(stage.tensors)

    def _put(self, tensors: dict[str, torch.Tensor], version: str | None, bucket: torch.Tensor | None = None) -> None:
        """Into the stage, which is written while the next ones are on their way."""
        self._stage = stage = self._stage or self._stager.open(self.model.live, self.model.device)
        if version is not None:
            stage.version = version
        self._stager.put(stage, tensors, bucket)

    async def from_disk(self, folder: Path, version: str | None, mode: Mode | None) -> int:
        """Load a Hugging Face folder: into the open update, or, without one, at once."""
        async with self._turn:
            try:
                await self._in_thread(lambda: self._put(dict(read_tensors(folder, self.model)), version))
            except ModelError as error:
                raise UpdateError(str(error)) from error
            except asyncio.CancelledError:
                if not self.open:  # nobody will end it
                    self._stage = None
                raise
            if self.open:
                return 0
            stage, self._stage = self._stage, None
            return await self._switch(stage, version, mode)

    # ---- memory

    async def release(self) -> None:
        """Give the weights' memory back. Nothing may be running; nothing is generated until an update brought others."""
        async with self._turn:
            if self.open:
                raise UpdateError("release_memory_occupation: a weight update is open; end it first")
            if not await asyncio.wrap_future(self.scheduler.call(self.scheduler.release_weights)):
                raise UpdateError("release_memory_occupation: requests are running; pause with mode retract first")
            await self._in_thread(self._stager.let_go)

    async def take(self) -> None:
        """Take the memory that was released; the next update is written into it."""
        async with self._turn:
            if (live := self.model.live).hollow and self._stage is None:
                await self._in_thread(lambda: self._stager.give_back(live.beside(self.model.device)))

    # ---- verification

    async def checksums(self) -> dict[str, Any]:
        """sha256 of each tensor and the digest of all: of the staged ones while an update holds any, else of the live ones."""
        async with self._turn:
            return await self._in_thread(self._checksums)

    def _checksums(self) -> dict[str, Any]:
        if self._stage is not None:
            self._stage.settle()
            specs = list(self._stage.specs.values())
        elif self.model.live.hollow:
            raise UpdateError("the weights were released, and no update has brought others yet")
        else:
            found = ((name, parameter.read()) for name, parameter in self.model.parameters.items())
            specs = [spec_of(name, tensor) for name, tensor in found]
        return {
            "checksums": {spec.name: spec.sha256 for spec in specs},
            "digest": digest(specs),
            "staged": self._stage is not None,
        }
