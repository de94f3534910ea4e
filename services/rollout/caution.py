"""How many groups may run beside each other, so that a group that kills its engine takes no others along to the dead letters.

A delivery counts for every group that was on a replica when that or its engine died, and too many deliveries make a group a dead
letter. So after a death the next engine begins with one group at a time, and gets twice as many with each that comes through; and
a group in its last deliveries runs alone (tries.py remembers that it did). Who waits for weights gives its place up meanwhile:
they may depend on a group that is not let in yet. That the process before this one died is told by a file that only a clean end
removes. tests/rollout/test_caution.py, tests/chaos/test_faults.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

RAMP_S = 10.0
"""An engine that lives on for so long deserves twice the trust, too: groups may take many minutes."""
LAST_TRIES = 3
"""So many of a group's last deliveries it runs alone."""


class Caution:
    """One replica's places."""

    def __init__(self, most: int, max_deliveries: int, careful: bool = False) -> None:
        self.most, self.allowed = most, 1 if careful else most
        self.suspect = max(2, max_deliveries + 1 - LAST_TRIES)
        """The delivery from which on a group runs alone."""
        self.held, self.alone = 0, False
        """Groups that run beside each other; whether one runs alone."""
        self.suspects = 0
        """In hand, to run alone: nobody else is let in."""
        self.returning = 0
        """Rested, and waiting to go on."""
        self._since = time.monotonic()
        self.changed = asyncio.Condition()

    def engine_died(self) -> None:
        """With groups on it: the next engine begins with one."""
        self.allowed, self._since = 1, time.monotonic()

    async def trust(self, came_through: bool = False) -> None:
        """A group came through, or a moment has passed: perhaps there may be more."""
        if self.allowed < self.most and (came_through or time.monotonic() - self._since > RAMP_S):
            self.allowed, self._since = min(self.most, self.allowed * 2), time.monotonic()
            await self.tell()

    def has_room(self, returning: bool) -> bool:
        return self.held < self.allowed and not self.suspects and (returning or not self.returning)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[Place]:
        """Wait for a place, and hold it: from before a prompt is asked for until its group is finished."""
        place = Place(self)
        await place.enter()
        try:
            yield place
        finally:
            place.leave()
            await self.tell()

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


@dataclass(slots=True)
class Place:
    """Of one group: it runs beside others or alone, or it rests."""

    caution: Caution
    suspect: bool = False
    state: Literal["", "beside", "alone"] = ""

    async def taken(self, delivered: int) -> None:
        """By a group of that delivery. A suspect waits until nobody else runs, and nobody is let in."""
        caution = self.caution
        if delivered < caution.suspect:
            return
        self.leave()
        self.suspect = True
        caution.engine_died()  # there may be more of them
        await self.enter()

    @asynccontextmanager
    async def resting(self) -> AsyncIterator[None]:
        """What waits for weights is at nobody's risk and in nobody's way: they may depend on a group that is not let in yet."""
        self.leave()
        await self.caution.tell()
        yield
        await self.enter(returning=True)

    async def enter(self, returning: bool = False) -> None:
        """One that comes back from its rest goes before those who would only ask for a prompt."""
        caution = self.caution
        if self.suspect:
            return await self._enter_alone()
        caution.returning += returning
        try:
            async with caution.changed:
                await caution.changed.wait_for(lambda: caution.has_room(returning))
                caution.held, self.state = caution.held + 1, "beside"
        finally:
            caution.returning -= returning
        if returning:
            await caution.tell()

    async def _enter_alone(self) -> None:
        caution = self.caution
        caution.suspects += 1
        try:
            async with caution.changed:
                caution.changed.notify_all()
                await caution.changed.wait_for(lambda: caution.held == 0 and not caution.alone)
                caution.alone, self.state = True, "alone"
        finally:
            caution.suspects -= self.state != "alone"  # cancelled

    def leave(self) -> None:
        caution, state = self.caution, self.state
        self.state = ""
        if state == "beside":
            caution.held -= 1
        elif state == "alone":
            caution.alone = False
            caution.suspects -= 1


@contextmanager
def at_work(mark: Path) -> Iterator[bool]:
    """Leave a mark while this process works. Yields whether the one before it was killed at work."""
    killed = mark.exists()
    mark.touch()
    yield killed
    mark.unlink()  # not reached by a process that fails
