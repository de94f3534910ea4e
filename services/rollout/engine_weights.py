"""Puts new weights into an engine: received by broadcast or loaded from a folder, verified, and only then served.

An engine that stages (`/server_info` says `staged_updates`) generates on while it receives; its staged copy is verified and
switched in between two steps, or dropped. What happens to running requests then is `rollout.on_new_weights`; with `abort` they
are ended with what they have, and continue from their tokens (draw.py). Another engine is paused first and overwritten in
place; if that fails it stays paused, because it may hold half of each, until `load` gave it verified weights. An engine that
cannot tell sha256 checksums under Hugging Face names (`verifiable` False) is only ever given verified files.
tests/dcs/test_receiver.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from services.dcs.digest import TensorSpec, differences
from services.dcs.versions import JOIN_S
from services.rollout.engines.client import EngineClient, EngineDead, EngineError, PauseMode, SwitchMode
from shared.records import Announcement
from shared.timing import timed

log = logging.getLogger(__name__)


class WeightsRefused(RuntimeError):
    """The engine holds, or was sent, other bytes than were announced."""


class EngineWeights:
    """The weights of one running engine."""

    def __init__(
        self, engine: EngineClient, mode: PauseMode, *, stages: bool, verifiable: bool, ranks: int = 1
    ) -> None:
        self.ranks = ranks
        """Members of the broadcast group that this engine is."""
        self._engine, self._on_new = engine, mode
        self._mode: SwitchMode = "in_place" if mode == "in_place" else "retract"
        self.stages, self.verifiable = stages, verifiable
        self._groups: list[str] = []
        """Of the broadcast: one a sender."""

    @classmethod
    async def attach(
        cls, engine: EngineClient, mode: PauseMode, version: int, tensors: Sequence[TensorSpec]
    ) -> EngineWeights:
        """Take over an engine that was started on `tensors`. Raises WeightsRefused if it holds others."""
        weights, held = await cls.of(engine, mode, tensors)
        weights._compare(tensors, held)
        await engine.set_version(str(version))
        return weights

    @classmethod
    async def of(
        cls, engine: EngineClient, mode: PauseMode, tensors: Sequence[TensorSpec]
    ) -> tuple[EngineWeights, dict[str, str]]:
        """For an engine that may hold anything, and the checksums of what it holds."""
        info = await engine.server_info()
        held = (await engine.checksums()).tensors
        weights = cls(
            engine,
            mode,
            stages=bool(info.get("staged_updates")),
            ranks=int(info.get("tp_size") or 1),
            verifiable=any(len(held.get(spec.name, "")) == len(spec.sha256) for spec in tensors),
        )
        return weights, held

    async def receive(self, told: Announcement, rank: int, seconds: dict[str, float]) -> None:
        """Take a version from its broadcast. Raises EngineError or WeightsRefused; what was served before is untouched if
        the engine stages, else it is left paused."""
        assert told.group is not None
        specs, version = specs_of(told), str(told.version)
        deadline = time.monotonic() + float(told.group["timeout_s"])
        try:
            with timed(seconds, "join"):
                await self._join(told.group, rank, deadline)
            async with self._update(version, specs, seconds, session=True):
                with timed(seconds, "transfer"):
                    sent = [
                        (self._groups[sender], [specs[index] for index in bucket])
                        for sender, bucket in zip(told.group["sent_by"], told.buckets, strict=True)
                    ]
                    await self._receive(sent, version, deadline)
        except (EngineError, WeightsRefused):
            await self.leave_group()
            raise

    async def take(self, told: Announcement, seconds: dict[str, float]) -> None:
        """Take a version out of the trainer's shared memory. Raises as `receive` does. Only for an engine that stages."""
        assert told.shared is not None
        if not self.stages:
            raise WeightsRefused("this engine does not stage weights, so it takes none from shared memory")
        specs, version, names = specs_of(told), str(told.version), told.shared["segments"]
        async with self._staged(version, specs, seconds):
            with timed(seconds, "transfer"):
                for bucket, name in zip(told.buckets, names, strict=True):
                    await self._engine.update_from_shared([specs[index] for index in bucket], name, version)

    async def load(self, folder: Path, version: int, tensors: Sequence[TensorSpec], seconds: dict[str, float]) -> None:
        """Take a version from a verified folder. Raises as `receive` does."""
        async with self._update(str(version), tensors, seconds, session=False):
            with timed(seconds, "load"):
                await self._engine.update_from_disk(
                    str(folder),
                    str(version),
                    flush_cache=self._mode == "retract",
                    mode=self._mode if self.stages else None,
                )

    async def leave_group(self) -> None:
        """Give the process groups up, if there are any."""
        names, self._groups = self._groups, []
        for name in names:
            try:
                await self._engine.destroy_group(name)
            except EngineDead:
                raise
            except EngineError as error:  # it may never have got into the group, which is as well
                log.info("the engine did not leave group %s: %s", name, error)

    def _update(
        self, version: str, tensors: Sequence[TensorSpec], seconds: dict[str, float], *, session: bool
    ) -> AbstractAsyncContextManager[None]:
        if self.stages:
            return self._staged(version, tensors, seconds)
        return self._paused(tensors, seconds, session)

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _join(self, group: dict[str, Any], rank: int, deadline: float) -> None:
        """Meet every sender, in the same order as all other members do."""
        if self._groups == [sender["name"] for sender in group["senders"]]:
            return
        await self.leave_group()
        for sender in group["senders"]:
            self._groups.append(sender["name"])
            await self._engine.init_group(
                sender["host"],
                sender["port"],
                rank,
                group["world_size"],
                sender["name"],
                group["backend"],
                max(1.0, min(JOIN_S, deadline - time.monotonic())),
            )

    async def _receive(self, sent: list[tuple[str, list[TensorSpec]]], version: str, deadline: float) -> None:
        """Buckets, each in its sender's group. One call for all of them, if the engine stages. SGLang's own API wants one for
        each, and to be told with the last what they make."""
        if self.stages:
            await self._engine.update_from_buckets(sent, max(0.1, deadline - time.monotonic()))
            return
        for number, (group, bucket) in enumerate(sent, start=1):
            last = number == len(sent)
            await self._engine.update_from_distributed(
                bucket,
                group,
                weight_version=version if last else None,
                flush_cache=last and self._mode == "retract",
                timeout_s=max(0.1, deadline - time.monotonic()),
            )

    @asynccontextmanager
    async def _staged(
        self, version: str, tensors: Sequence[TensorSpec], seconds: dict[str, float]
    ) -> AsyncIterator[None]:
        """The body fills the stage; then that is verified and switched in, or dropped."""
        await self._engine.begin_update()
        try:
            yield
            await self._verify(tensors, seconds)
        except Exception:
            await self._engine.end_update(commit=False)
            raise
        with timed(seconds, "switch"):
            if self._on_new == "abort":
                await self._engine.abort(everything=True)
            await self._engine.end_update(commit=True, weight_version=version, mode=self._mode)

    @asynccontextmanager
    async def _paused(
        self, tensors: Sequence[TensorSpec], seconds: dict[str, float], session: bool
    ) -> AsyncIterator[None]:
        """The body overwrites the live weights; generation goes on only if they are verified then."""
        await self._engine.pause(self._on_new)
        if session:
            await self._engine.begin_update()
        try:
            yield
        finally:
            if session:  # an open one would refuse the next
                await self._engine.end_update()
        await self._verify(tensors, seconds)
        await self._engine.resume()

    async def _verify(self, tensors: Sequence[TensorSpec], seconds: dict[str, float]) -> None:
        with timed(seconds, "verify"):
            self._compare(tensors, (await self._engine.checksums()).tensors)

    def _compare(self, tensors: Sequence[TensorSpec], held: dict[str, str]) -> None:
        if self.verifiable and (wrong := differences(tensors, held)):
            raise WeightsRefused(f"{len(wrong)} of {len(tensors)} tensors have other checksums, {wrong[0]} first")


def specs_of(told: Announcement) -> list[TensorSpec]:
    columns = zip(told.names, told.dtypes, told.shapes, told.checksums, strict=True)
    return [TensorSpec(name, dtype, tuple(shape), sha256) for name, dtype, shape, sha256 in columns]
