"""Weight updates inside SGLang: received and checked beside the running model, made live between two decode steps.

    begin_weight_update -> update_weights_from_distributed | _from_tensor | _from_disk (any number) -> end_weight_update

The receiving is receiving.py's, and the model the `Target`'s (target.py). Owns the staged tensors of the open update. Guarantees,
beside those of receiving.py, the light engine's, held for both by tests/contract/test_updates.py:
* what is received is not visible before `end(commit=True)`, and decoding goes on meanwhile;
* a failed transfer leaves the live weights as they were.

Differences from bare SGLang: updates are staged, so no pause is needed; unknown names are refused, where it answers success;
checksums are sha256 of the tensors under their Hugging Face names, of the staged ones while an update holds any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from services.dcs.digest import TensorSpec, digest
from services.rollout.engines.receiving import Receiving, spec_of
from services.rollout.engines.update_routes import Mode


class Target(Protocol):
    """The model that the weights are for."""

    device: torch.device
    """Where it computes, and where NCCL delivers."""
    stage: torch.device
    """Where tensors that came by NCCL wait for the switch. What was shared on a device stays there."""
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


class Weights(Receiving):
    """One engine's updates."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.device, target.rank)
        self.target = target
        self.served: str | None = None
        """The version of the last switch."""
        self._staged: dict[str, torch.Tensor] = {}
        self._version: str | None = None

    def check(self, name: str, shape: tuple[int, ...]) -> str | None:
        return self.target.check(name, shape)

    def _landed(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.target.stage) for name, tensor in tensors.items()}

    # ---- the update

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

    def _put(self, tensors: dict[str, torch.Tensor], version: str | None, bucket: torch.Tensor | None = None) -> None:
        self._staged.update(tensors)
        if version is not None:
            self._version = version

    async def from_disk(self, folder: Path, version: str | None, mode: Mode | None) -> int:
        """Load a Hugging Face folder: into the open update, or, without one, at once."""
        async with self._turn:
            tensors = await self._in_thread(lambda: self.target.read(folder))
            if self.open:
                self._put(tensors, version)
                return 0
            return await self._switch(tensors, version, mode)

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
    return [spec_of(name, tensor) for name, tensor in tensors.items()]
