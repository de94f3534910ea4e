"""Services as child processes on this machine.

Owns: the processes, their log files `<workdir>/logs/<service>-<n>.log`, and what ends them. Each child leads a process group of
its own, so that Ctrl-C on the terminal reaches only `slipstream up`, which then asks the children to drain. A child dies with
its parent (`shared/parent.py`). Every exit is put into `exits`. `tests/controller/test_local_launcher.py` holds this with
small scripts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.controller.launchers.launcher import REASON, Exit
from shared.credentials import of_service

CANNOT_START = 126
"""Stands for the exit code of a process that the system would not start."""


@dataclass(slots=True)
class Child:
    """One service process."""

    service: str
    replica: str
    log: Path
    process: asyncio.subprocess.Process
    started: float

    @property
    def pid(self) -> int:
        return self.process.pid


Command = Callable[[str, str], list[str]]
"""(service, replica) -> argv."""


def serve_command(url: str, run: str) -> Command:
    """argv of a service of `run`, as `slipstream up` starts it."""

    def command(service: str, replica: str) -> list[str]:
        options = ["--nats", url, "--run", run, "--replica", replica, "--parent", str(os.getpid())]
        return [sys.executable, "-m", "services.controller.cli", "serve", service, *options]

    return command


@dataclass(slots=True)
class LocalLauncher:
    """Starts children and tells of their exits."""

    command: Command
    logs: Path
    environment: dict[str, str] = field(default_factory=dict)
    kind: str = "local"
    children: dict[str, Child] = field(default_factory=dict)
    exits: asyncio.Queue[Exit] = field(default_factory=asyncio.Queue)
    _watchers: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def start(self, service: str, replica: str) -> int:
        """Start a replica; its pid. 0 if the system cannot: that is an exit like others."""
        self.logs.mkdir(parents=True, exist_ok=True)
        path = self.logs / f"{replica}.log"
        with path.open("ab") as log:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.command(service, replica),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **of_service(service), **self.environment},
                )
            except OSError as error:
                log.write(f"{REASON}the process cannot be started: {error}\n".encode())
                self.exits.put_nowait(Exit(service, replica, 0, CANNOT_START, path, 0.0))
                return 0
        child = self.children[replica] = Child(service, replica, path, process, time.monotonic())
        self._watchers[replica] = asyncio.create_task(self._watch(child))
        return child.pid

    async def _watch(self, child: Child) -> None:
        code = await child.process.wait()
        self.children.pop(child.replica, None)
        seconds = time.monotonic() - child.started
        self.exits.put_nowait(Exit(child.service, child.replica, child.pid, code, child.log, seconds))

    def signal(self, number: signal.Signals, services: Sequence[str] | None = None) -> None:
        """Send a signal to the children (of `services` only); SIGKILL to their whole process groups, so that nothing stays."""
        for child in self._of(services):
            _send(child, number)

    def kill(self, replica: str) -> None:
        """SIGKILL to one replica's process group: the only signal that a stopped process heeds."""
        if (child := self.children.get(replica)) is not None:
            _send(child, signal.SIGKILL)

    def terminate(self, replica: str) -> None:
        """SIGTERM to one replica: it drains and leaves."""
        if (child := self.children.get(replica)) is not None:
            _send(child, signal.SIGTERM)

    def _of(self, services: Sequence[str] | None) -> list[Child]:
        return [child for child in self.children.values() if services is None or child.service in services]

    async def gone(self, timeout_s: float, services: Sequence[str] | None = None) -> bool:
        """Wait until no child (of `services`) is left. False if some are after `timeout_s`."""
        watchers = [self._watchers[child.replica] for child in self._of(services)]
        if not watchers:
            return True
        _, left = await asyncio.wait(watchers, timeout=timeout_s)
        return not left

    async def stop(self, drain_s: float, services: Sequence[str] | None = None) -> list[str]:
        """SIGTERM, time to drain, SIGKILL for the rest. Returns the replicas that had to be killed."""
        self.signal(signal.SIGTERM, services)
        if await self.gone(drain_s, services):
            return []
        late = sorted(child.replica for child in self._of(services))
        self.signal(signal.SIGKILL, services)
        await self.gone(drain_s, services)
        return late

    async def close(self) -> None:
        """It holds nothing else."""


def _send(child: Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself in this moment; its exit is on the way
        if number == signal.SIGKILL:
            os.killpg(child.pid, number)
        else:
            os.kill(child.pid, number)
