"""Time in which this process was awake: who judges others by their silence must not count its own sleep.

A process that was stopped, starved or suspended with its machine finds every deadline passed when it goes on, and what the others
said meanwhile unread. So silence is measured in the looker's own looks, of which none counts for more than a short while.

Guarantees, held by tests/shared/test_awake.py: no pause between two looks adds more than `longest_s`, however long it was; who
looks more often than that measures time as it is; nobody is `Missing` who was seen, or not looked for, within `grace_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager

TICK_S = 0.25
LONGEST_S = 2 * TICK_S
"""The most that one round of a loop may add."""


class Awake:
    """Adds up the time between looks. Pure: `now` is the caller's steady time."""

    def __init__(self, longest_s: float) -> None:
        self.longest_s, self.seconds = longest_s, 0.0
        self._looked: float | None = None

    def look(self, now: float) -> float:
        """Seconds awake since the first look."""
        if self._looked is not None:
            self.seconds += min(now - self._looked, self.longest_s)
        self._looked = now
        return self.seconds

    def close_eyes(self) -> None:
        """What passes until the next look does not count at all."""
        self._looked = None


class Missing:
    """Who was missing at every look for `grace_s` of the looker's time. A heartbeat that ran out while the broker, or the whole
    machine, stood still is written again within moments; that of a dead replica is not."""

    def __init__(self, grace_s: float, longest_s: float) -> None:
        self.grace_s, self._awake = grace_s, Awake(longest_s)
        self._since: dict[str, float] = {}

    def look(self, missing: Iterable[str], now: float) -> set[str]:
        """Those of `missing` that have been so for long enough."""
        at = self._awake.look(now)
        self._since = {name: self._since.get(name, at) for name in missing}
        return {name for name, since in self._since.items() if at - since >= self.grace_s}


@contextmanager
def clock() -> Iterator[Callable[[], float]]:
    """A clock that stands still while the running loop does."""
    loop, awake = asyncio.get_running_loop(), Awake(LONGEST_S)

    def look() -> float:
        awake.look(loop.time())
        return TICK_S

    with _again_and_again(look):
        yield lambda: awake.look(loop.time())


@asynccontextmanager
async def timeout(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """As `asyncio.timeout`, of seconds awake."""
    loop, awake = asyncio.get_running_loop(), Awake(LONGEST_S)

    def look() -> float:
        left = seconds - awake.look(loop.time())
        if left <= 0:
            scope.reschedule(loop.time())
        return min(TICK_S, left)

    async with asyncio.timeout(None) as scope:
        with _again_and_again(look):
            yield scope


@contextmanager
def _again_and_again(look: Callable[[], float]) -> Iterator[None]:
    """Call it now and each time after the seconds that it returns, until they are none or the block is left."""
    loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()

    def tick() -> None:
        timers.clear()
        if (pause := look()) > 0:
            timers.append(loop.call_later(pause, tick))

    tick()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
