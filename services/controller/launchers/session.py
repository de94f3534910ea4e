"""One stay of `slipstream up` beside its run: services and broker are kept alive, the run is shown, its state is watched.

`Session.wait` ends with an `Outcome`: the run is over, somebody stops it, or it cannot go on. Services that die or hang are
started again by the keeper (keeper.py), the private broker here: one that died, and one that lives but greets nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.live import Live

from services.controller.attach import Run
from services.controller.launchers.broker import PrivateBroker
from services.controller.launchers.broker_keeper import BrokerKeeper
from services.controller.launchers.keeper import Keeper
from services.controller.launchers.launcher import Launcher
from services.controller.launchers.supervision import Rules, Supervisor
from services.controller.launchers.telling import Teller
from services.controller.view import RunView, event_line, follow
from shared.config import RunConfig
from shared.errors import TransportError

log = logging.getLogger(__name__)

POLL_S = 1.0
CATCH_UP_S = 10.0
BROKER_LOST = 3
"""Exit code."""
FIXED = (("dcs", "dcs-0"), ("controller", "controller-0"), ("trainer", "trainer-0"))
"""(service, replica) of which there is one; the others are as many as the run's record wants (elastic.py)."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """Why `up` ends, and its exit code."""

    kind: str
    """finished | failed | stopped"""
    code: int
    why: str = ""


@dataclass(slots=True)
class Interrupts:
    """Ctrl-C: the first asks for draining, the second for an end at once."""

    first: asyncio.Event = field(default_factory=asyncio.Event)
    second: asyncio.Event = field(default_factory=asyncio.Event)

    def strike(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Session:
    """Watches a run until it ends. The live view is part of it."""

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        launcher: Launcher,
        broker: PrivateBroker | None,
        interrupts: Interrupts,
        console: Console,
    ) -> None:
        self.config, self.run, self.launcher, self.broker = config, run, launcher, broker
        self.interrupts, self.console = interrupts, console
        self.view = RunView(config)
        self.teller = Teller(run)
        silent_s = config.heartbeat_ttl_s
        self.broker_keeper = BrokerKeeper(run.registry, silent_s, self.teller, self.say)
        self.keeper = Keeper(
            run, launcher, Supervisor(Rules(silent_s)), self.teller, self.say, lambda: self.broker_keeper.stores
        )
        self._began = time.time()
        self._told: set[float] = set()
        self._helpers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._helpers = [asyncio.create_task(self._show()), asyncio.create_task(self.broker_keeper.watch())]
        await self.keeper.start([*FIXED, *await self.keeper.elastic.first(self.config)])
        self.teller.tell("up", "up", "started", f"{len(self.launcher.children)} services", host="local")

    async def wait(self) -> Outcome:
        """Until the run is over, somebody stops it, or it cannot go on."""
        watches: list[Coroutine[Any, Any, Outcome]] = [self._interrupted(), self._state_ends(), self._keep()]
        if self.broker is not None:
            watches.append(self._keep_broker(self.broker))
        tasks = [asyncio.create_task(watch) for watch in watches]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task in done).result()
        finally:
            await _cancel(tasks)

    async def catch_up(self) -> None:
        """Wait until the view has seen every receipt: the last updates may be younger than its last look."""
        if last := await self.run.queue.last_seq("receipts"):
            with contextlib.suppress(TimeoutError):  # the view may have ended; the report tells all
                await asyncio.wait_for(self.view.seen(last), CATCH_UP_S)

    async def close(self) -> None:
        """End the live view; it shows its last state."""
        await self.teller.close()
        await _cancel(self._helpers)

    async def _interrupted(self) -> Outcome:
        await self.interrupts.first.wait()
        return Outcome("stopped", 130)

    async def _state_ends(self) -> Outcome:
        while True:
            self.view.waits_for = self.keeper.supervisor.waits_for()
            try:
                state = await self.run.state()
            except TransportError as error:
                self.view.phase = "waiting for the broker"
                log.debug("the run's state cannot be read: %s", error)
            else:
                if state == "finished":
                    return Outcome("finished", 0)
                if state.startswith("failed"):
                    return Outcome("failed", 1, state.partition(":")[2])
            await asyncio.sleep(POLL_S)

    async def _keep(self) -> Outcome:
        why, gone = await self.keeper.keep()
        lines = "\n".join(f"  {line}" for line in gone.tail())
        self.console.print(
            f"{gone.replica}: {gone.how}. The end of {gone.log}:\n{lines}", markup=False, highlight=False
        )
        return Outcome("failed", 1, why)

    async def _keep_broker(self, broker: PrivateBroker) -> Outcome:
        return Outcome("failed", BROKER_LOST, await self.broker_keeper.keep(broker))

    def say(self, text: str, style: str = "") -> None:
        self.console.print(text, style=style, markup=False, highlight=False)

    async def _show(self) -> None:
        """The live view; it may fail without harm to the run, but not silently."""
        try:
            if self.console.is_terminal:
                with Live(self.view.render(time.time()), console=self.console, auto_refresh=False) as live:
                    await self._follow(lambda: self._draw(live))
            else:
                await self._follow(self._print_lines)
        except* (TransportError, ValueError) as errors:
            self.say(f"the live view ended ({errors.exceptions[0]}); the run goes on", "yellow")

    async def _follow(self, show: Callable[[], None]) -> None:
        try:
            await follow(self.view, self.run.queue, self.run.registry, show)
        finally:
            show()

    def _draw(self, live: Live) -> None:
        live.update(self.view.render(time.time(), self.console.width), refresh=True)

    def _print_lines(self) -> None:
        for event in self.view.events:
            if event.at >= self._began and event.at not in self._told and event.detail.get("by") != "up":
                self._told.add(event.at)
                self.console.print(event_line(event), markup=False, highlight=False)
        for at, line in self.view.step_lines():
            if at >= self._began:
                self.console.print(line, markup=False, highlight=False)
