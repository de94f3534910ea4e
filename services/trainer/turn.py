"""The trainer's side of a shared device: it computes there only in its turn, when every engine sleeps (`placement: colocate`).

    take: ask, wait until no engine is awake, put the models back on the device
    give: take the models off the device, let the engines wake on the newest weights

Guarantees: between `take` and `give` no engine holds the device; an engine whose replica is gone is not waited for, but it is not
given up before it has had no heartbeat for `heartbeat_ttl_s` of looks, lest the two meet because the broker, the machine or the
replica stood still for a while; a trainer that starts anew takes the turn before it loads anything; one that was replaced is
refused and must stop. Until every engine has taken the weights they stay in shared memory, and no longer. With `placement:
separate` all of this does nothing. The rules are shared/turns.py's. tests/dcs/test_colocate.py.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from shared import failpoints
from shared.awake import Missing
from shared.service import Context, ServiceFailed
from shared.turn_table import TurnTable, pauses
from shared.turns import Replaced

log = logging.getLogger(__name__)

LONGEST_LOOK_S = 1.0
"""The most that one look at the heartbeats may add to a silence (shared/awake.py)."""


class Sleeper(Protocol):
    """The models, as far as the device is concerned."""

    def sleep(self) -> None: ...
    def wake(self) -> None: ...


class DeviceTurn:
    """`policy` is set as soon as there is one."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._table = TurnTable(ctx.kv, self._broker_away)
        self._incarnation = uuid.uuid4().hex
        self.policy: Sleeper | None = None
        self.held = not ctx.config.colocated
        self.sleeps = self.wakes = 0
        self.sleep_s = self.wake_s = 0.0
        self._tidying: asyncio.Task[None] | None = None
        self._missing = Missing(ctx.config.heartbeat_ttl_s, LONGEST_LOOK_S)

    async def take(self, within_s: float | None = None) -> bool:
        """Have the device. False if the service is to stop, or the time is up, before every engine sleeps."""
        if self.held:
            return True
        await self._tidied()
        began = time.monotonic()
        with self._ctx.metrics.wait("turn"):
            await self._table.change(lambda turns: turns.ask(self._incarnation, socket.gethostname()))
            failpoints.reach("trainer.asked")
            pause = pauses()
            while not await self._alone():
                left = None if within_s is None else within_s - (time.monotonic() - began)
                if (left is not None and left <= 0) or (left is None and self._ctx.stopping.is_set()):
                    return False
                await self._ctx.beat("waiting for the engines to sleep")
                await asyncio.sleep(next(pause))
        self.held = True
        if self.policy is not None:
            started = time.monotonic()
            await self._ctx.compute(self.policy.wake)
            self.wakes, self.wake_s = self.wakes + 1, self.wake_s + time.monotonic() - started
        failpoints.reach("trainer.awake")
        return True

    async def give(self, version: int, unshare: Callable[[], None]) -> None:
        """Leave the device to the engines, which take this version; `unshare` is called when all of them have."""
        if not self.held or not self._ctx.config.colocated:
            return
        assert self.policy is not None
        started = time.monotonic()
        await self._ctx.compute(self.policy.sleep)
        self.sleeps, self.sleep_s = self.sleeps + 1, self.sleep_s + time.monotonic() - started
        self.held = False
        failpoints.reach("trainer.asleep")
        try:
            await self._ctx.vouch(self._table.change(lambda turns: turns.give(self._incarnation, version)))
        except Replaced as error:
            raise ServiceFailed(str(error)) from error
        failpoints.reach("trainer.gave")
        self._ctx.metrics.emit(**self._counts())
        self._tidying = asyncio.create_task(self._tidy(version, unshare))

    async def settled(self) -> None:
        """Until every engine has taken the weights, or it is time to stop, or `dcs.timeout_s` are over."""
        if self._tidying is not None:
            waiting = asyncio.wait({self._tidying}, timeout=self._ctx.config.dcs.timeout_s)
            await self._ctx.vouch(self._ctx.stop_or(waiting))
        await self._tidied()

    def _counts(self) -> dict[str, Any]:
        return {
            "sleeps_total": self.sleeps,
            "wakes_total": self.wakes,
            "sleep_s_total": self.sleep_s,
            "wake_s_total": self.wake_s,
        }

    async def _alone(self) -> bool:
        turns = await self._table.read()
        try:
            if turns.alone(self._incarnation):
                return True
        except Replaced as error:
            raise ServiceFailed(str(error)) from error
        await self._put_out_missing(turns.awake())
        return False

    async def _put_out_missing(self, awaited: list[str]) -> None:
        """Whoever has no heartbeat any more has no engine either: an engine does not outlive its replica."""
        living = await self._ctx.registry.living(awaited)
        lost = self._missing.look(set(awaited) - living, time.monotonic())
        if not lost:
            return
        grace_s = self._ctx.config.heartbeat_ttl_s

        def put_out(turns: Any) -> list[str]:
            gone = [one for one in turns.missing(living, time.time(), grace_s) if one in lost]
            turns.put_out(gone)
            return gone

        if gone := await self._table.change(put_out):
            text = f"{', '.join(gone)}: no heartbeat, so its engine is not waited for"
            await self._ctx.events.publish("turn_put_out", text, replicas=gone)

    async def _tidy(self, version: int, unshare: Callable[[], None]) -> None:
        """When all have taken the weights, nobody needs the shared memory any more."""
        for pause in pauses():
            if (await self._table.read()).taken(version):
                break
            await asyncio.sleep(pause)
        unshare()

    async def _tidied(self) -> None:
        task, self._tidying = self._tidying, None
        if task is not None:
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(result, Exception):
                log.warning("shared memory is kept until the next version: %s", result)

    async def _broker_away(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
