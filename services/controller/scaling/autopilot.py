"""Looks at the run for the autoscaler, and does what it decides through scale operations of its own.

Every decision is an event `autoscale`, in a dry run too; the last are at GET /autoscaler. tests/controller/test_autopilot.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from services.controller.scaling.autoscaler import Decision, Load, Memory, decide
from services.controller.scaling.operation import Seen
from services.controller.scaling.scaler import Scaler
from shared import wire
from shared.errors import TransportError
from shared.records import Metric
from shared.sections import AutoscaleConfig

log = logging.getLogger(__name__)

ROLE = "rollout"
KEPT = 1000
TIMEOUT_S = 600.0


class Decided(BaseModel):
    at: float
    replicas: int
    target: int
    why: str
    done: bool
    """False in a dry run."""


class Status(BaseModel):
    mode: str
    """off | dry_run | on"""
    load: dict[str, Any] | None
    """The last look."""
    verdict: str
    history: list[Decided]
    """The newest first."""


class Autopilot:
    """`run` for ever beside a scaler."""

    def __init__(self, scaler: Scaler, rules: AutoscaleConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.scaler, self.rules, self._clock = scaler, rules, clock
        self.memory, self.verdict = Memory(), Decision(None, "no look yet")
        self.load: Load | None = None
        self.history: deque[Decided] = deque(maxlen=KEPT)
        self._trainer: Metric | None = None
        """The newest that it said."""
        self._idle: float | None = None

    async def run(self) -> None:
        """Look and act."""
        while True:
            await asyncio.sleep(self.rules.every_s)
            try:
                await self.turn()
            except (TransportError, TimeoutError) as error:
                log.warning("the autoscaler cannot look at the run: %s", error)

    async def turn(self) -> None:
        """One look, and what follows."""
        self.load = await self.look()
        self.verdict, self.memory = decide(self.load, self.rules, self.memory)
        if self.verdict.target is None:
            return
        now, there, target = time.time(), self.load.replicas, self.verdict.target
        acts = self.rules.mode == "on"
        self.history.appendleft(Decided(at=now, replicas=there, target=target, why=self.verdict.why, done=acts))
        text = f"{'' if acts else 'dry run: '}{ROLE} {there} -> {target}: {self.verdict.why}"
        await self.scaler.ctx.events.publish("autoscale", text, replicas=there, target=target, dry_run=not acts)
        if acts:
            timeout_s = TIMEOUT_S if target > there else self.scaler.drain_s
            await self.scaler.submit("out" if target > there else "in", ROLE, target=target, timeout_s=timeout_s)

    async def look(self) -> Load:
        """What the run says of itself."""
        ctx = self.scaler.ctx
        seen, depths = await asyncio.gather(self.scaler.seen(), ctx.queue.depths())
        await self._hear_trainer(seen)
        rollouts = [beat for beat in seen.beats.values() if beat.service == ROLE]
        room = len(rollouts) * ctx.config.rollout.max_running_groups
        running = sum(int(beat.detail.get("running", 0)) for beat in rollouts)
        ages = self._trainer.values.get("staleness_mean") if self._trainer is not None else None
        return Load(
            at=self._clock(),
            replicas=len(seen.natives(ROLE)),
            waiting=depths["prompts"].pending,
            idle=self._idle,
            busy=running / room if room else None,
            slack=None if ages is None else ctx.config.max_staleness - ages,
            slots=ctx.config.slots,
            operating=any(not one.over and one.role == ROLE for one in self.scaler.operations.values()),
        )

    async def _hear_trainer(self, seen: Seen) -> None:
        """Its idle share between its last two messages that were apart."""
        ctx = self.scaler.ctx
        trainer = next((beat for beat in seen.beats.values() if beat.service == "trainer"), None)
        last = await ctx.queue.last(ctx.subjects.metrics("trainer", trainer.replica)) if trainer is not None else None
        if last is None:
            return
        metric, before = wire.decode(last[0], Metric), self._trainer
        if before is None or metric.replica != before.replica or "staleness_mean" not in metric.values:
            self._trainer = metric if before is None or "staleness_mean" in metric.values else before
            return
        waited = metric.values.get("wait_s.groups", 0.0) - before.values.get("wait_s.groups", 0.0)
        if metric.at > before.at and waited >= 0.0:
            self._idle = min(1.0, waited / (metric.at - before.at))
        elif waited < 0.0:  # another process: its clocks began anew
            self._idle = None
        self._trainer = metric


def router(autopilot: Autopilot | None) -> APIRouter:
    routes = APIRouter()

    @routes.get("/autoscaler")
    async def status() -> Status:
        """The last look, what was made of it, and the decisions so far."""
        if autopilot is None:
            return Status(mode="off", load=None, verdict="controller.autoscale is not set", history=[])
        load = None
        if autopilot.load is not None:
            load = {name: getattr(autopilot.load, name) for name in Load.__slots__}
        history = list(autopilot.history)
        return Status(mode=autopilot.rules.mode, load=load, verdict=autopilot.verdict.why, history=history)

    return routes
