"""One stay of `slipstream up` beside its run: who exits, who comes back, whether the broker lives, what the run's state says.

`Session.wait` ends with an `Outcome`; what an exit means is decided by `judge`, which is pure. A rollout, reward, controller or
dcs process that is killed does not end the run: whoever starts it again by hand (the line to type is shown) lets it go on.
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
from services.controller.launchers.local import Exit, LocalLauncher
from services.controller.view import RunView, event_line, follow
from shared.broker import BrokerError
from shared.config import RunConfig
from shared.errors import TransportError
from shared.metrics import Events

log = logging.getLogger(__name__)

POLL_S = 1.0
BROKER_POLL_S = 0.25
CATCH_UP_S = 10.0
BROKER_LOST = 3
"""Exit code."""
BROKER_RESTARTS = 5
"""So often the private broker is started again before the run gives up; a minute without a death forgives all earlier ones."""
FORGIVEN_AFTER_S = 60.0


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


def services_of(config: RunConfig) -> list[tuple[str, int]]:
    """(service, number) of all that `up` starts, in the order of starting."""
    counts = {
        "dcs": 1,
        "controller": 1,
        "trainer": 1,
        "reward": config.reward.replicas,
        "rollout": config.rollout.replicas,
    }
    return [(service, number) for service, count in counts.items() for number in range(count)]


def judge(exit: Exit) -> Outcome | None:
    """What an exit means for a run that is not over: its end, or None if the replica may be started again."""
    if exit.code > 0:
        return Outcome("failed", 1, f"{exit.replica} failed: {exit.how}")
    if exit.service == "trainer":
        return Outcome("failed", 1, f"{exit.replica} ended before the run was over: {exit.how}")
    return None


class Session:
    """Watches a run until it ends. The live view is part of it."""

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        launcher: LocalLauncher,
        broker: PrivateBroker | None,
        interrupts: Interrupts,
        console: Console,
    ) -> None:
        self.config, self.run, self.launcher, self.broker = config, run, launcher, broker
        self.interrupts, self.console = interrupts, console
        self.view = RunView(config)
        self.events = Events(run.queue, run.subjects, "up", "up")
        self.missing: dict[str, Exit] = {}
        self._began = time.time()
        self._told: set[float] = set()
        self._helpers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._helpers = [asyncio.create_task(self._show()), asyncio.create_task(self._returns())]
        for service, number in services_of(self.config):
            await self.launcher.start(service, number)
        await self.events.publish("started", f"{len(self.launcher.children)} services", host="local")

    async def wait(self) -> Outcome:
        """Until the run is over, somebody stops it, or it cannot go on."""
        watches: list[Coroutine[Any, Any, Outcome]] = [self._interrupted(), self._state_ends(), self._exits()]
        if self.broker is not None:
            watches.append(self._broker_fails(self.broker))
        tasks = [asyncio.create_task(watch) for watch in watches]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task in done).result()
        finally:
            await _cancel(tasks)

    async def catch_up(self) -> None:
        """Wait until the view has seen every receipt: the last updates may be younger than its last look."""
        if (last := await self.run.queue.last(self.run.subjects.receipts)) is not None:
            with contextlib.suppress(TimeoutError):  # the view may have ended; the report tells all
                await asyncio.wait_for(self.view.seen(last[1]), CATCH_UP_S)

    async def close(self) -> None:
        """End the live view; it shows its last state."""
        await _cancel(self._helpers)

    async def _interrupted(self) -> Outcome:
        await self.interrupts.first.wait()
        return Outcome("stopped", 130)

    async def _state_ends(self) -> Outcome:
        while True:
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

    async def _exits(self) -> Outcome:
        while True:
            gone = await self.launcher.exits.get()
            if (state := await self._state_now()) in ("finished", "") or state.startswith("failed"):
                continue  # it left because the run is over; `_state_ends` tells how
            if (outcome := judge(gone)) is not None:
                self._show_log(gone)
                return outcome
            self.missing[gone.replica] = gone
            await self._tell_missing(gone)

    async def _state_now(self) -> str:
        """The run's state; 'running' if the broker cannot say."""
        try:
            return await self.run.state()
        except TransportError:
            return "running"

    async def _tell_missing(self, gone: Exit) -> None:
        again = f"slipstream serve {gone.service} --nats {self.run.url} --run {self.run.name} --replica {gone.replica}"
        self.say(f"[yellow]{gone.replica} is gone ({gone.how}); the run goes on. Start it again with:[/]\n  {again}")
        await self.events.publish("exit", f"{gone.replica}: {gone.how}", pid=gone.pid, code=gone.code)

    def _show_log(self, gone: Exit) -> None:
        lines = "\n".join(f"  {line}" for line in gone.tail())
        self.console.print(
            f"{gone.replica}: {gone.how}. The end of {gone.log}:\n{lines}", markup=False, highlight=False
        )

    async def _returns(self) -> None:
        """Notice replicas that somebody started again."""
        while True:
            for beat in self.view.replicas:
                gone = self.missing.get(beat.replica)
                if gone is not None and beat.pid != gone.pid:
                    del self.missing[beat.replica]
                    self.say(f"[green]{beat.replica} is back (pid {beat.pid})[/]")
                    await self.events.publish("return", f"{beat.replica} is back", pid=beat.pid)
            await asyncio.sleep(POLL_S)

    async def _broker_fails(self, broker: PrivateBroker) -> Outcome:
        """Start the private broker again when it dies: nobody else knows its store. Ends if it does not stay up."""
        deaths = 0
        last = time.monotonic()
        while True:
            await asyncio.sleep(BROKER_POLL_S)
            if broker.running:
                continue
            deaths = 1 if time.monotonic() - last > FORGIVEN_AFTER_S else deaths + 1
            last = time.monotonic()
            if deaths > BROKER_RESTARTS:
                return Outcome(
                    "failed", 3, f"the broker died {deaths} times within a minute; see {broker.store}/nats-server.log"
                )
            try:
                await asyncio.to_thread(broker.restart)
            except BrokerError as error:
                return Outcome("failed", BROKER_LOST, f"the broker died and cannot be started again: {error}")
            self.say(f"[yellow]the broker died; started again on its store (pid {broker.pid}), nothing is lost[/]")
            await self.events.publish("broker", "the private broker died and was started again", pid=broker.pid)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    async def _show(self) -> None:
        """The live view; it may fail without harm to the run, but not silently."""
        try:
            if self.console.is_terminal:
                with Live(self.view.render(time.time()), console=self.console, auto_refresh=False) as live:
                    await self._follow(lambda: self._draw(live))
            else:
                await self._follow(self._print_lines)
        except* (TransportError, ValueError) as errors:
            self.say(f"[yellow]the live view ended ({errors.exceptions[0]}); the run goes on[/]")

    async def _follow(self, show: Callable[[], None]) -> None:
        try:
            await follow(self.view, self.run.queue, self.run.registry, show)
        finally:
            show()

    def _draw(self, live: Live) -> None:
        live.update(self.view.render(time.time(), self.console.width), refresh=True)

    def _print_lines(self) -> None:
        for event in self.view.events:
            if event.at >= self._began and event.at not in self._told and event.service != "up":
                self._told.add(event.at)
                self.console.print(event_line(event), markup=False, highlight=False)
        for at, line in self.view.step_lines():
            if at >= self._began:
                self.console.print(line, markup=False, highlight=False)
