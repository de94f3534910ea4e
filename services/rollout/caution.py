"""How many groups may run beside each other, so that a group that kills its engine takes no others along to the dead letters.

A delivery counts for every group that was on a replica when that or its engine died, and too many deliveries make a group a dead
letter. So after a death the next engine begins with one group at a time, and gets twice as many with each that comes through; and
a group in its last deliveries runs alone, with no other one in hand. Then only the one that does it is counted on. That the
process before this one died is told by a file that only a clean end removes. tests/rollout/test_caution.py,
tests/chaos/test_faults.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

RAMP_S = 10.0
"""An engine that lives on for so long deserves twice the trust, too: groups may take many minutes."""
LAST_TRIES = 3
"""So many of a group's last deliveries it runs alone."""


class Caution:
    """One replica's places. A place is held from before a prompt is asked for until its group is finished."""

    def __init__(self, most: int, max_deliveries: int, careful: bool = False) -> None:
        self.most, self.allowed = most, 1 if careful else most
        self.suspect = max(2, max_deliveries + 1 - LAST_TRIES)
        """The delivery from which on a group runs alone."""
        self._held, self._since = 0, time.monotonic()
        self._suspects = 0
        """In hand: nobody is let in."""
        self._alone = asyncio.Lock()
        self._changed = asyncio.Condition()

    def engine_died(self) -> None:
        """With groups on it: the next engine begins with one."""
        self.allowed, self._since = 1, time.monotonic()

    async def trust(self, came_through: bool = False) -> None:
        """A group came through, or a moment has passed: perhaps there may be more."""
        if self.allowed < self.most and (came_through or time.monotonic() - self._since > RAMP_S):
            self.allowed, self._since = min(self.most, self.allowed * 2), time.monotonic()
            await self._tell()

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._held < self.allowed and not self._suspects)
            self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            await self._tell()

    @asynccontextmanager
    async def beside_others(self, delivered: int) -> AsyncIterator[None]:
        """Inside a place. For a suspect: not beside others but once nobody else holds a place, and with nobody let in."""
        if delivered < self.suspect:
            yield
            return
        self.allowed, self._since = 1, time.monotonic()  # there may be more of them
        self._held -= 1  # of several suspects that came at once each waits for its turn without a place
        self._suspects += 1
        try:
            await self._tell()
            async with self._alone:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._held == 0)
                yield
        finally:
            self._suspects -= 1
            self._held += 1

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()


@contextmanager
def at_work(mark: Path) -> Iterator[bool]:
    """Leave a mark while this process works. Yields whether the one before it was killed at work."""
    killed = mark.exists()
    mark.touch()
    yield killed
    mark.unlink()  # not reached by a process that fails
