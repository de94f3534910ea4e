"""Keeps one engine on the newest weights, and says which ones it serves.

    bootstrap (newest snapshot, pulled and verified) -> engine starts on it -> attach (verify what it holds, join) -> run:
    announcement -> receive by broadcast -> verify -> switch -> answer, or else pull the snapshot

Guarantees: `version`, `step` and `wait_step` tell only of weights that were verified on the engine's own copy; whatever goes
wrong with a broadcast (a dead publisher, a deadline, other bytes) is answered as failed and made good from the newest
snapshot; versions never go back. Torch-free: the engine's process is the member of the broadcast group, and only metadata
passes through here. How an engine takes weights: engine_weights.py. tests/dcs/test_receiver.py, tests/dcs/test_weights.py.

With `placement: colocate` an engine loses its weights when it sleeps (seat.py). It is filled again when it wakes, from the memory
that the trainer shares; if that fails, from the snapshot, which is written a moment later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from services.dcs import snapshots
from services.dcs.client import DcsClient, DcsUnavailable, Refused, persist
from services.dcs.digest import ManifestError
from services.dcs.pulling import Pulled, pull
from services.dcs.snapshots import Manifest, SnapshotError
from services.rollout.engine_weights import EngineWeights, WeightsRefused
from services.rollout.engines.client import EngineClient, EngineDead, EngineError
from shared import failpoints
from shared.config import ConfigError
from shared.records import Announcement, Received
from shared.service import Context, ServiceFailed
from shared.timing import timed
from shared.wire import WireError, decode

log = logging.getLogger(__name__)

T = TypeVar("T")
How = Literal["broadcast", "shared", "snapshot", "delta", "folder"]

FAR = "SLIPSTREAM_FAR"
"""Set: this replica is out of the broadcast's reach and pulls. `slipstream serve rollout --far` sets it."""
POLL_S = 0.2
BACK_OFF_S = (0.2, 1.0, 2.0, 5.0)
LOAD_TRIES = 5
LEAVE_DEADLINE_S = 3.0
DOUBT_S = 5.0


@dataclass(frozen=True, slots=True)
class Start:
    """The weights to start an engine on: verified files."""

    folder: Path
    manifest: Manifest

    @property
    def version(self) -> int:
        return self.manifest.version

    @property
    def step(self) -> int:
        return self.manifest.step


class WeightReceiver:
    """The weights of one engine. A new engine takes a new receiver."""

    def __init__(self, ctx: Context, cache: Path) -> None:
        self._ctx, self._cache = ctx, cache
        self._dcs = DcsClient(ctx.kv)
        self._incarnation = uuid.uuid4().hex
        self.version, self.step = -1, -1
        self._steps: dict[int, int] = {}
        self._weights: EngineWeights | None = None
        self._read_from = 1
        self._newest: Announcement | None = None
        self._ranks: dict[int, int | None] = {}
        """In the group of the epoch that was told last. Told once an epoch, which goes on only if all took part."""
        self._heard, self._pause_s = time.monotonic(), 0.0
        """When the newest was read, and how long after the one before."""
        self._arrived = asyncio.Event()
        self._changed = asyncio.Condition()
        self._far = not ctx.config.dcs.broadcast or bool(os.environ.get(FAR)) or ctx.config.colocated
        self._updating = asyncio.Lock()
        self._asleep = self._empty = False
        """No update may begin; the engine has no weights."""
        self._wanted = 0
        """The version that an empty engine is to be filled with, or a newer one."""
        self._following = self._leaving = False
        self._anew = False
        """Somebody wants it to fetch its weights again."""
        self._pulled: How = "snapshot"
        """How the weights came that the engine started on."""

    # -- what the worker calls ----------------------------------------------------------------------------------------

    async def bootstrap(self) -> Start | None:
        """The newest version, pulled and verified; waits for the first one. None: the service is to stop."""
        last = await self._ctx.queue.last(self._ctx.subjects.announced)
        self._read_from = last[1] if last else 1  # from before the pull, so that nothing told meanwhile is missed
        while True:
            try:
                pulled = await self._pull_newest()
                self._pulled = pulled.how
                return Start(pulled.folder, pulled.manifest)
            except Refused as refused:
                log.debug("no version to start from yet: %s", refused)
            except SnapshotError as error:
                await self._ctx.events.publish("snapshot_refused", str(error))
            except DcsUnavailable:
                return None
            await self._ctx.beat("waiting for weights")
            await self._ctx.sleep(POLL_S)
            if self._ctx.stopping.is_set():
                return None

    async def attach(self, engine: EngineClient, start: Start) -> None:
        """Verify that the engine holds what it was started on, then take part in broadcasts."""
        mode = self._ctx.config.rollout.on_new_weights
        try:
            self._weights = await EngineWeights.attach(engine, mode, start.version, start.manifest.tensors)
        except WeightsRefused as error:
            raise ServiceFailed(
                f"the engine loaded other weights than version {start.version} holds ({error}); "
                "is model.dtype what the trainer publishes and the engine runs in?"
            ) from error
        if self._ctx.config.colocated and not self._weights.stages:
            raise ConfigError(
                "placement: colocate: the engine takes no weights by their names with this model or these options "
                "(docs/sglang.md), and so none from shared memory; use placement: separate"
            )
        await self._serve(start.version, start.step)
        await self._answer(start.version, start.step, start.manifest.digest, self._pulled, {})
        await self._join()

    async def run(self) -> None:
        """Follow the announcements until cancelled. Raises EngineDead, or ServiceFailed if the engine takes no weights."""
        reading, told = asyncio.create_task(self._read()), asyncio.create_task(self._arrived.wait())
        self._following = True
        try:
            while True:
                await asyncio.wait({told, reading}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    reading.result()
                    raise ServiceFailed("the reader of the weights stream ended by itself")
                self._arrived.clear()
                told = asyncio.create_task(self._arrived.wait())
                async with self._updating:
                    if self._newest is not None and self._due(self._newest.version):
                        await self._update(self._newest)
        finally:
            self._following = False
            reading.cancel()
            told.cancel()
            await asyncio.gather(reading, told, return_exceptions=True)
            await self.leave()

    def step_of(self, version: int) -> int:
        """The step of a version that was announced or served here. KeyError: never heard of."""
        return self._steps[version]

    async def wait_step(self, min_step: int, timeout_s: float) -> bool:
        """Until weights of `min_step` or later are served; False when the time is up."""
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: self.step >= min_step)
            except TimeoutError:
                return False
        return True

    async def sleep(self) -> None:
        """No update begins until `wake`; returns when the one under way has ended or given up."""
        self._asleep = True
        self._arrived.set()
        async with self._updating:
            self._empty = True

    def wake(self, version: int) -> None:
        """The engine lost its weights: fill it with this version, or with a newer one."""
        self._asleep, self._wanted = False, version
        self._arrived.set()

    async def filled(self, timeout_s: float) -> bool:
        """Until the engine serves weights again; False when the time is up."""
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(lambda: not self._empty)
            except TimeoutError:
                return False
        return True

    async def leave(self) -> None:
        """Out of the group. While `run` goes on, a broadcast that still counts on this engine is finished first."""
        if self._leaving:
            return
        self._leaving = True
        try:
            leaving = self._dcs.leave(self._ctx.replica, incarnation=self._incarnation, gone=not self._following)
            awaited = await asyncio.wait_for(leaving, LEAVE_DEADLINE_S)
            if self._following and awaited > self.version:
                async with self._changed:
                    await asyncio.wait_for(
                        self._changed.wait_for(lambda: self.version >= awaited), self._ctx.config.dcs.timeout_s
                    )
        except (DcsUnavailable, Refused, TimeoutError) as error:
            log.info("left without the DCS's word (%s); it will notice by the heartbeat", error or "no answer in time")
        finally:
            await self._dcs.close()

    async def close(self) -> None:
        """End the connection to the DCS. For a receiver that was never run, too."""
        await self._dcs.close()

    # -- following ----------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Keep the newest announcement; older ones that are replayed or skipped leave only their step."""
        stream = self._ctx.queue.read(
            "weights", start_seq=self._read_from, subject=self._ctx.subjects.announced, live=True
        )
        async for data, _ in stream:
            try:
                told = decode(data, Announcement)
            except WireError as error:
                await self._ctx.events.publish("announcement_refused", str(error))
                continue
            self._steps[told.version] = told.step
            if self._ctx.replica in told.resync and self.version >= 0:
                self._anew = True
                self._arrived.set()
            if self._newest is None or told.version > self._newest.version:
                self._newest, self._pause_s = told, time.monotonic() - self._heard
                self._heard = time.monotonic()
                self._arrived.set()

    def _due(self, version: int) -> bool:
        """Whether the newest announced version is to be taken now."""
        if self._asleep or (self._empty and version < self._wanted):
            return False
        return version > self.version or self._anew or self._empty

    async def _update(self, told: Announcement) -> None:
        """From shared memory if it lies there, by broadcast if this engine is in the group, else, or if that fails, from the
        newest snapshot."""
        assert self._weights is not None
        if told.shared is not None and not self._anew:
            here = told.shared["host"] == socket.gethostname()
            if here and await self._directly(told, "shared", partial(self._weights.take, told)):
                return
            if not await self._written(told):
                return
        rank = None if self._anew else await self._rank_in(told)
        if rank is None or not await self._directly(told, "broadcast", partial(self._weights.receive, told, rank)):
            await self._catch_up(told)

    async def _rank_in(self, told: Announcement) -> int | None:
        """Its rank in a broadcast that can still be joined."""
        if (group := told.group) is None:
            return None
        if "ranks" in group:
            self._ranks = {group["epoch"]: group["ranks"].get(self._incarnation)}
        rank = self._ranks.get(group["epoch"])
        return None if rank is None or await self._too_late(told.version) else int(rank)

    async def _too_late(self, version: int) -> bool:
        """The others are through or have given up. Clocks of two hosts cannot tell, so the DCS is asked, if there is any doubt:
        after a pause in which the broker may have been away, or if something kept this replica busy since it heard."""
        if max(self._pause_s, time.monotonic() - self._heard) < DOUBT_S:
            return False
        try:
            return (await self._dcs.version(version))["phase"] != "announced"
        except DcsUnavailable:
            return False  # the deadline of joining tells
        except Refused:
            return True

    async def _written(self, told: Announcement) -> bool:
        """Wait for the snapshot of a version that is announced before that is there. False: something else comes first."""
        while self._newest is told and not self._asleep and not self._ctx.stopping.is_set():
            with suppress(Refused):  # there is none yet
                if int((await self._ask(self._dcs.latest))["version"]) >= told.version:
                    return True
            await self._back_off(POLL_S)
        self._arrived.set()
        return False

    async def _directly(
        self, told: Announcement, how: How, receive: Callable[[dict[str, float]], Awaitable[None]]
    ) -> bool:
        """Without files. False if it failed, which is answered."""
        seconds = {"notice": max(0.0, time.time() - told.at)}
        try:
            with timed(seconds, "total"):
                await receive(seconds)
        except EngineDead:
            raise
        except (EngineError, WeightsRefused, ManifestError) as error:
            await self._answer(told.version, told.step, told.digest, how, seconds, f"{type(error).__name__}: {error}")
            return False
        await self._serve(told.version, told.step)
        failpoints.reach("rollout.switched")
        await self._answer(told.version, told.step, told.digest, how, seconds)
        return True

    async def _catch_up(self, told: Announcement) -> None:
        """Pull and load the newest snapshot, again and again until the engine serves it."""
        for attempt in range(LOAD_TRIES):
            seconds: dict[str, float] = {"notice": max(0.0, time.time() - told.at)}
            try:
                with timed(seconds, "total"):
                    with timed(seconds, "pull"):
                        pulled = await self._pull_newest()
                    manifest = pulled.manifest
                    if manifest.version <= self.version and not self._anew and not self._empty:
                        return
                    await self._load(pulled.folder, manifest, seconds)
            except EngineDead:
                raise
            except (EngineError, WeightsRefused, SnapshotError, Refused) as error:
                failure = f"{type(error).__name__}: {error}"
                await self._answer(told.version, told.step, told.digest, "snapshot", seconds, failure)
                await self._back_off(BACK_OFF_S[min(attempt, len(BACK_OFF_S) - 1)])
                continue
            await self._answer(manifest.version, manifest.step, manifest.digest, pulled.how, seconds)
            await self._join()
            return
        raise ServiceFailed(f"version {told.version} could not be loaded in {LOAD_TRIES} tries: {failure}")

    async def _back_off(self, seconds: float) -> None:
        """Until then, or until a newer version is announced: that one may be whole."""
        self._arrived.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), seconds)
            self._arrived.set()

    async def _load(self, folder: Path, manifest: Manifest, seconds: dict[str, float]) -> None:
        assert self._weights is not None
        self._steps[manifest.version] = manifest.step
        self._anew = False
        await self._weights.load(folder, manifest.version, manifest.tensors, seconds)
        await self._serve(manifest.version, manifest.step)
        await asyncio.to_thread(snapshots.prune, self._cache, {manifest.version}, manifest.version)

    async def _pull_newest(self) -> Pulled:
        config = self._ctx.config
        shared = config.work_path / "snapshots" if config.dcs.shared_folder else None

        async def fetch() -> Pulled:
            newest = await self._dcs.latest()
            return await pull(self._dcs, int(newest["version"]), self._cache, shared)

        pulled = await self._ask(fetch)
        if pulled.refused:
            await self._ctx.events.publish("delta_refused", pulled.refused, version=pulled.manifest.version)
        return pulled

    async def _serve(self, version: int, step: int) -> None:
        self._steps[version] = step
        async with self._changed:
            self.version, self.step, self._empty = version, step, False
            self._changed.notify_all()

    async def _answer(
        self,
        version: int,
        step: int,
        digest: str,
        how: How,
        seconds: dict[str, float],
        error: str = "",
    ) -> None:
        record = Received(self._ctx.replica, version, step, digest, how, seconds, not error, error, time.time())
        await self._ctx.queue.publish(self._ctx.subjects.received, record)

    async def _join(self) -> None:
        """Into the group, or again into it after it was left behind; what is far or cannot be verified stays outside."""
        assert self._weights is not None
        ranks = self._weights.ranks
        if self._leaving or self._far or not self._weights.verifiable:
            return
        await self._ask(lambda: self._dcs.join(self._ctx.replica, incarnation=self._incarnation, world_size=ranks))

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """Ask the DCS, waiting for one that is away until the service is to stop."""

        async def pause(seconds: float) -> bool:
            if self.version < 0:  # nothing is served yet, so nobody else beats
                await self._ctx.beat("waiting for the DCS")
            await self._ctx.sleep(seconds)
            return not self._ctx.stopping.is_set()

        return await persist(call, pause)
