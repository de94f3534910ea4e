"""Keeps the services of a run alive on this machine: what `supervision.py` decides, done to real processes and told to the run.

Each death, replacement and return is an event of the service that it befell (`exit`, `hung`, `restart`, `back`) with cause, pid
and times, so that `slipstream events --service rollout` shows it, also when the run is over. Telling never delays a restart:
events wait for a broker that is away on their own. tests/e2e/test_up.py runs it over real processes, tests/chaos with SIGKILLs
on all of them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from services.controller.attach import Run
from services.controller.launchers.elastic import Elastic
from services.controller.launchers.launcher import Exit, Launcher
from services.controller.launchers.supervision import GiveUp, Left, Restart, Supervisor
from services.controller.launchers.telling import Teller
from shared.errors import TransportError

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between two looks at the registry."""
SLOW_S = 2.0
"""A look that takes longer met a broker that was away."""


class Keeper:
    """Starts replicas, and starts them again. `say` takes news for people, and a colour."""

    def __init__(
        self,
        run: Run,
        launcher: Launcher,
        supervisor: Supervisor,
        teller: Teller,
        say: Callable[[str, str], None],
        broker_stores: Callable[[], bool],
    ) -> None:
        self.run, self.launcher, self.supervisor, self.teller, self.say = run, launcher, supervisor, teller, say
        self.broker_stores = broker_stores
        """Nobody is accused of silence while the broker stores nothing."""
        self.elastic = Elastic(run, launcher, supervisor, self._start)
        self._services: dict[str, str] = {}
        """By replica."""
        self._news = asyncio.Event()

    async def start(self, services: Iterable[tuple[str, str]]) -> None:
        """Start (service, replica) all for the first time."""
        for service, replica in services:
            await self._start(replica, service)

    async def keep(self) -> tuple[str, Exit]:
        """Until the run must be given up: why, and after whose exit."""
        given_up = asyncio.create_task(self._watch_exits())
        tasks: list[asyncio.Task[Any]] = [given_up]
        tasks += [asyncio.create_task(work) for work in (self._watch_beats(), self._start_due(), self.elastic.follow())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            return given_up.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- deaths -------------------------------------------------------------------------------------------------------

    async def _watch_exits(self) -> tuple[str, Exit]:
        while True:
            gone = await self.launcher.exits.get()
            if gone.code >= 0 and await self._is_over():
                continue  # it left because the run is over, which the session sees by itself
            if why := self._exited(gone):
                return why, gone

    async def _is_over(self) -> bool:
        try:
            state = await self.run.state()
        except TransportError:
            return False
        return state in ("finished", "") or state.startswith("failed")

    def _exited(self, gone: Exit) -> str:
        """Decide and tell. Why the run is to be given up, or ''."""
        how = f"{gone.how}: {gone.last_words}" if gone.code > 0 and gone.last_words else gone.how
        decision = self.supervisor.exited(gone.replica, gone.code, how, time.monotonic())
        last = self.supervisor.watched[gone.replica].heard
        cause = self.supervisor.watched[gone.replica].cause
        detail: dict[str, Any] = {"pid": gone.pid, "code": gone.code, "cause": cause, "lived_s": round(gone.seconds, 2)}
        detail |= {} if last is None else {"state": last.state, "progress": last.progress}
        if isinstance(decision, GiveUp) and self.elastic.gives_up(gone.replica, how):
            self._tell(gone.replica, "exit", f"{how}; it is not started again", detail)
            return ""
        if isinstance(decision, GiveUp):
            self._tell(gone.replica, "exit", f"{how}; the run is given up", detail)
            return decision.why
        if isinstance(decision, Left):
            self.elastic.left(gone.replica, decision.say)
            self._tell(gone.replica, "exit", decision.say or "left, as it was asked to", detail)
            if decision.say:
                self.say(decision.say, "yellow")
            return ""
        self._tell(gone.replica, "exit", decision.cause, detail | {"again_in_s": decision.delay_s})
        self._say_restart(gone, decision)
        self._news.set()
        return ""

    def _say_restart(self, gone: Exit, decision: Restart) -> None:
        if decision.say:
            self.say(f"{decision.say}; its log is {gone.log}", "yellow")
        elif decision.attempt == 1:
            self.say(f"{gone.replica} died ({decision.cause}); it is started again", "yellow")

    # -- starts -------------------------------------------------------------------------------------------------------

    async def _start_due(self) -> None:
        while True:
            self._news.clear()
            for replica in self.supervisor.due(time.monotonic()):
                await self._start(replica)
            due = self.supervisor.next_due()
            try:
                async with asyncio.timeout(None if due is None else max(0.01, due - time.monotonic())):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _start(self, replica: str, service: str = "") -> None:
        """`service` when it is started for the first time."""
        service = self._services.setdefault(replica, service)
        pid = await self.launcher.start(service, replica)
        now = time.monotonic()
        before = self.supervisor.watched.get(replica)
        if before is not None and before.died is not None:
            detail = {
                "pid": pid,
                "cause": before.cause,
                "attempt": before.deaths,
                "down_s": round(now - before.died, 2),
            }
            self._tell(replica, "restart", f"started again as pid {pid}", detail)
        self.supervisor.started(service, replica, pid, now)

    # -- heartbeats ---------------------------------------------------------------------------------------------------

    async def _watch_beats(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.broker_stores():
                self.supervisor.blind()
                continue
            asked = time.monotonic()
            try:
                beats = await self.run.registry.alive()
            except TransportError as error:
                log.debug("the registry cannot be read: %s", error)
                self.supervisor.blind()
                continue
            now = time.monotonic()
            if now - asked > SLOW_S:
                self.supervisor.blind()
            for replica, child in list(self.launcher.children.items()):
                self.supervisor.placed(replica, child.pid, now)
            for beat in beats:
                if (back := self.supervisor.heard(beat, now)) is not None:
                    text = f"{back.replica} is back after {back.down_s:.1f} s"
                    self.say(f"{text} (pid {back.pid})", "green")
                    self._tell(back.replica, "back", text, {"pid": back.pid, "down_s": round(back.down_s, 2)})
            for hung in self.supervisor.looked(now):
                self._tell(hung.replica, "hung", hung.cause, {"pid": self.supervisor.watched[hung.replica].pid})
                self.launcher.kill(hung.replica)

    def _tell(self, replica: str, kind: str, message: str, detail: dict[str, Any]) -> None:
        self.teller.tell(self.supervisor.watched[replica].service, replica, kind, message, **detail)
