"""Services as forks of one process that has imported everything: a restart costs milliseconds instead of seconds of imports.

A fork lives as `slipstream serve` does, under a failpoint if it is given one. `Forks` starts each replica again when a failpoint
has killed it, with the next one of its list, and remembers which it has seen fire. One that finds its role taken is started again
until it is free; one that was `doomed` may end as it likes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.context
import os
import signal
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

SERVICES = ("controller", "dcs", "trainer", "reward", "rollout")
POLL_S = 0.02
ROLE_TAKEN = 4

forkserver = multiprocessing.get_context("forkserver")
forkserver.set_forkserver_preload([f"services.{service}.main" for service in SERVICES])


def serve(service: str, replica: str, url: str, run: str, failpoint: str | None, log: str) -> None:
    """In the fork."""
    from shared import failpoints
    from shared.parent import die_with_parent
    from shared.service import run_service

    die_with_parent(os.getppid())
    os.setsid()
    with open(log, "ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    failpoints.arm(failpoint)
    sys.exit(
        run_service(service, import_module(f"services.{service}.main").main, nats_url=url, run=run, replica=replica)
    )


def call(function: str, *arguments: object) -> None:
    """Run `module:name` with its arguments in a fork, to its end. RuntimeError if it fails."""
    process = forkserver.Process(target=_call, args=(function, *arguments))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{function} ended with exit code {process.exitcode}")


def _call(function: str, *arguments: object) -> None:
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(*arguments)


@dataclass
class Forks:
    """The services of one run. `points`: replica -> failpoints of its lives, in order; then it lives without one."""

    url: str
    run: str
    logs: Path
    replicas: tuple[str, ...]
    points: dict[str, list[str]] = field(default_factory=dict)
    fired: list[str] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    """Exit codes of doomed replicas."""
    _doomed: set[str] = field(default_factory=set)
    _living: dict[str, tuple[multiprocessing.context.ForkServerProcess, str | None]] = field(default_factory=dict)

    def start(self, replica: str) -> None:
        left = self.points.get(replica)
        point = left.pop(0) if left else None
        log = str(self.logs / f"{replica}.log")
        process = forkserver.Process(
            target=serve, args=(replica.rpartition("-")[0], replica, self.url, self.run, point, log)
        )
        process.start()
        self._living[replica] = process, point

    def send(self, replica: str, number: signal.Signals) -> None:
        os.kill(self.pid(replica), number)

    def pid(self, replica: str) -> int:
        process, _ = self._living[replica]
        assert process.pid is not None
        return process.pid

    def doom(self, replica: str) -> None:
        """It is expected to end before the run does, and not to be started again."""
        self._doomed.add(replica)

    async def finish(self, deadline_s: float) -> None:
        """Until all have left by themselves, with exit code 0."""
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            async with asyncio.timeout(deadline_s):
                for replica in self.replicas:
                    self.start(replica)
                while self._living:
                    self._look()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(
                f"not finished after {deadline_s} s; lives: {list(self._living)}; {self.fired}"
            ) from None
        finally:
            self.kill()

    def _look(self) -> None:
        for replica, (process, point) in list(self._living.items()):
            if process.exitcode is None:
                continue
            del self._living[replica]
            if process.exitcode == -signal.SIGKILL and point is not None:
                self.fired.append(point)
                self.start(replica)
            elif replica in self._doomed:
                self.ended[replica] = process.exitcode
            elif process.exitcode == ROLE_TAKEN:
                self.start(replica)
            elif process.exitcode != 0:
                raise AssertionError(f"{replica} ended with {process.exitcode}:\n{self.tail(replica)}")

    def tail(self, replica: str) -> str:
        return (self.logs / f"{replica}.log").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        for process, _ in self._living.values():
            process.kill()
        for process, _ in self._living.values():
            process.join()
        self._living.clear()
