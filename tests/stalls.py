"""Tests of times to live, on machines that may stand still: what fails while one stood still for too long proves nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from shared.errors import TransportError
from shared.jetstream import Connection

TRIES = 10
EVERY_S = 0.02


class Pace:
    """How long the longest round through this loop and the broker takes."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._began, self._longest = connection, time.monotonic(), 0.0

    @property
    def longest_s(self) -> float:
        return max(self._longest, time.monotonic() - self._began)

    async def watch(self) -> None:
        while True:
            await self._connection.api("INFO", deadline_s=60)
            await asyncio.sleep(EVERY_S)
            self._longest, self._began = self.longest_s, time.monotonic()


async def unless_stalled(attempt: Callable[[int], Awaitable[None]], connection: Connection, limit_s: float) -> None:
    """Run `attempt(number)` to its end. One that fails is tried again, with another number, if some round through this loop and
    the broker took longer than `limit_s` meanwhile; if none did, its failure counts."""
    for number in range(TRIES):
        pace = Pace(connection)
        watching = asyncio.create_task(pace.watch())
        try:
            return await attempt(number)
        except (AssertionError, TransportError, pytest.fail.Exception):
            if pace.longest_s <= limit_s or number + 1 == TRIES:
                raise
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
