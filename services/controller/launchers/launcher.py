"""What starts and ends the processes of a run: the protocol, and what an end looks like.

A launcher owns processes and says when they end; it decides nothing. Whether one is started again is `supervision`'s, how many
replicas there are is the run's record (shared/wanted.py, followed by `elastic`). `local` makes child processes, `ray` actors.
Under Docker Compose or Kubernetes nobody of us launches: containers come and go there, and only ask to be let in.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

TAIL_LINES = 15
TAIL_COLUMNS = 300
TAIL_BYTES = 32 << 10
REASON = "slipstream: "
"""Begins the line in which a service says why it leaves (shared/service.py)."""


class Launcher(Protocol):
    """Replicas as processes, somewhere."""

    kind: str
    exits: asyncio.Queue[Exit]

    @property
    def children(self) -> dict[str, Any]:
        """Those that live, by replica."""

    async def start(self, service: str, replica: str) -> int:
        """Start one; its pid, 0 if that is not known yet. One that cannot be started is an exit like others."""

    def terminate(self, replica: str) -> None:
        """Ask one to drain and leave."""

    def kill(self, replica: str) -> None:
        """End one at once, with all that it started."""

    def signal(self, number: signal.Signals, services: Sequence[str] | None = None) -> None:
        """SIGTERM or SIGKILL to all (of `services`)."""

    async def stop(self, drain_s: float, services: Sequence[str] | None = None) -> list[str]:
        """Ask all (of `services`) to leave, and kill those that have not within `drain_s`: which."""

    async def close(self) -> None:
        """Let go of what it holds besides processes."""


@dataclass(slots=True, frozen=True)
class Exit:
    """The end of a child. `code` below 0 is the signal that killed it."""

    service: str
    replica: str
    pid: int
    code: int
    log: Path
    seconds: float

    @property
    def how(self) -> str:
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        return f"exit code {self.code}"

    def tail(self) -> list[str]:
        """The last lines of its log."""
        return tail(self.log)

    @property
    def last_words(self) -> str:
        """What it said last of why it ended, or else the last line of its log."""
        lines = [line for line in self.tail() if line.strip()]
        reasons = [line.removeprefix(REASON) for line in lines if line.startswith(REASON)]
        return (reasons or lines or [""])[-1]


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log file."""
    with path.open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - TAIL_BYTES))
        last = log.read().decode(errors="replace").splitlines()[-lines:]
    return [line if len(line) <= TAIL_COLUMNS else f"{line[:TAIL_COLUMNS]}..." for line in last]
