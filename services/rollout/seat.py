"""A replica's place on a device that its engine shares with the trainer: who draws when, and who sleeps (`placement: colocate`).

    enter -> the engine starts -> drawing ... -> the trainer asks: finish what runs, sleep -> the trainer gives: wake, take the
    newest weights, draw again -> ... -> the engine ends -> leave

Guarantees: the engine holds the device only while the table says that it is awake; nothing is drawn, and no weights are loaded,
but in the engines' turn; a request is never interrupted by the trainer's turn; an engine that cannot be put to sleep or woken
counts as dead, so that another one is started. With `placement: separate` the gate is always open. The rules are
shared/turns.py's, what the engine does is tests/contract/test_sleep.py's. tests/dcs/test_colocate.py.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from services.rollout.engines.client import EngineClient, EngineDead, EngineError, MemoryTag
from services.rollout.weights import FAR
from shared import failpoints
from shared.config import ConfigError
from shared.service import Context
from shared.turn_table import LONGEST_S, TurnTable, pauses
from shared.turns import Turns

log = logging.getLogger(__name__)

LEAVE_DEADLINE_S = 5.0
WEIGHTS: tuple[MemoryTag, ...] = ("weights",)
REST: tuple[MemoryTag, ...] = ("kv_cache", "cuda_graph")
"""Taken when the weights are there: so the cache need not be cleared of old ones, and less memory is held at once."""


class Receiver(Protocol):
    """What fills the engine with weights (weights.py)."""

    version: int

    async def sleep(self) -> None: ...

    def wake(self, version: int) -> None: ...

    async def filled(self, timeout_s: float) -> bool: ...


class Seat:
    """Of one engine; the next engine takes a new one."""

    def __init__(self, ctx: Context) -> None:
        self._ctx, self._shared = ctx, ctx.config.colocated
        self._table = TurnTable(ctx.kv, asyncio.sleep)
        self._incarnation = uuid.uuid4().hex
        self.state: Literal["awake", "waking", "asleep"] = "awake"
        self._open = asyncio.Event()
        self._open.set()
        self._drawing = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.sleeps = self.wakes = 0
        self.sleep_s = self.wake_s = self._woken = 0.0

    # -- the engine's beginning and end -------------------------------------------------------------------------------

    async def enter(self) -> bool:
        """Wait until an engine may start here. False: the service is to stop."""
        if not self._shared:
            return True
        earlier = self._table.change(lambda turns: turns.leave(self._ctx.replica))  # a process before this
        await self._ctx.vouch(earlier)
        pause = pauses()
        while not self._ctx.stopping.is_set():
            self._check_place(await self._table.read())
            if await self._sit_down():
                failpoints.reach("rollout.entered")
                return True
            await self._ctx.beat("waiting for the device")
            await asyncio.sleep(next(pause))
        return False

    async def leave(self) -> None:
        """The engine has ended."""
        if not self._shared:
            return
        leaving = self._table.change(lambda turns: turns.leave(self._ctx.replica, self._incarnation))
        try:
            await asyncio.wait_for(self._ctx.vouch(leaving), LEAVE_DEADLINE_S)
        except TimeoutError:
            log.warning("left without the table's word; the trainer will see it by the heartbeat")

    # -- the worker ---------------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Something may be drawn now."""
        return self._open.is_set()

    async def opened(self, timeout_s: float) -> bool:
        """Until something may be drawn; False when the time is up."""
        try:
            await asyncio.wait_for(self._open.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Requests run meanwhile. Only while the gate is `open`."""
        assert self.open
        self._drawing += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._drawing -= 1
            if not self._drawing:
                self._idle.set()

    async def run(self, engine: EngineClient, receiver: Receiver) -> None:
        """Take turns with the trainer until cancelled. Raises EngineDead."""
        if not self._shared:
            return await asyncio.Event().wait()  # type: ignore[return-value]
        pause = pauses()
        try:
            while True:
                before = self.state
                await self._look(await self._table.read(), engine, receiver)
                if self.state != before:
                    pause = pauses()
                await asyncio.sleep(next(pause))
        except EngineDead:
            raise
        except EngineError as error:
            raise EngineDead(error.status, f"the engine does not take its turns: {error}") from error

    # -- taking turns -------------------------------------------------------------------------------------------------

    async def _look(self, turns: Turns, engine: EngineClient, receiver: Receiver) -> None:
        seat = turns.seat(self._ctx.replica)
        mine = seat is not None and seat.incarnation == self._incarnation
        if turns.holder == "trainer":
            if self.state != "asleep":
                await self._sleep(engine, receiver)
            return
        if self.state == "asleep":
            await self._wake(turns.version, engine, receiver)
        elif not mine:  # put out, as it had been silent
            await self._sit_down()
        if self.state == "waking" and await receiver.filled(LONGEST_S):
            await self._awake(engine)
        if self.state == "awake" and seat is not None and mine and seat.version != receiver.version:
            version = receiver.version
            await self._table.change(lambda turns: turns.took(self._ctx.replica, self._incarnation, version))
            failpoints.reach("rollout.took")

    async def _sleep(self, engine: EngineClient, receiver: Receiver) -> None:
        self._open.clear()
        await self._idle.wait()
        started = time.monotonic()
        failpoints.reach("rollout.idle")
        await receiver.sleep()
        await engine.pause("retract")
        await engine.release_memory(WEIGHTS if self.state == "waking" else (*WEIGHTS, *REST))
        self.state = "asleep"
        self.sleeps, self.sleep_s = self.sleeps + 1, self.sleep_s + time.monotonic() - started
        failpoints.reach("rollout.asleep")
        await self._table.change(lambda turns: turns.sleep(self._ctx.replica, self._incarnation))
        failpoints.reach("rollout.slept")
        self._emit()

    async def _wake(self, version: int, engine: EngineClient, receiver: Receiver) -> None:
        if not await self._sit_down():
            return
        self._woken = time.monotonic()
        failpoints.reach("rollout.entered")
        await engine.resume_memory(WEIGHTS)
        self.state = "waking"
        receiver.wake(version)

    async def _awake(self, engine: EngineClient) -> None:
        """The weights are there and verified; the cache was not needed before."""
        await engine.resume_memory(REST)
        await engine.resume()
        self.state = "awake"
        self.wakes, self.wake_s = self.wakes + 1, self.wake_s + time.monotonic() - self._woken
        self._open.set()
        self._emit()

    def _emit(self) -> None:
        self._ctx.metrics.emit(
            sleeps_total=self.sleeps, wakes_total=self.wakes, sleep_s_total=self.sleep_s, wake_s_total=self.wake_s
        )

    async def _sit_down(self) -> bool:
        replica, incarnation = self._ctx.replica, self._incarnation
        return await self._table.change(lambda turns: turns.enter(replica, incarnation, time.time()))

    def _check_place(self, turns: Turns) -> None:
        if os.environ.get(FAR):
            raise ConfigError("--far: with placement: colocate every replica is on the trainer's device; leave it out")
        if turns.host not in ("", here := socket.gethostname()):
            raise ConfigError(
                f"placement: colocate: the trainer's device is on {turns.host}, but this replica is on {here}; start it there, "
                "or use placement: separate"
            )
