"""The table of turns (shared/turns.py) in the run's config bucket: read it, and change it by compare-and-set.

Guarantees: `change` has happened when it returns, exactly as the rules say of the table that was there; what it applies may be
applied again if somebody else was faster. A broker that is away is waited for, for as long as `wait` says so.
tests/shared/test_turn_table.py.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from shared.errors import AccessDenied, BucketMissing, Conflict, KeyExists, TransportError
from shared.kv import KV
from shared.turns import KEY, Turns

log = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_S = 0.5
SHORTEST_S, LONGEST_S = 0.02, 0.25
"""Pauses between two looks."""


def pauses() -> Iterator[float]:
    """How long to wait before each next look at the table: moments at first, for a turn often comes soon."""
    pause = SHORTEST_S
    while True:
        yield pause
        pause = min(1.5 * pause, LONGEST_S)


class TurnTable:
    """`wait(seconds)` is called while the broker is away; it may raise to end the waiting."""

    def __init__(self, kv: KV, wait: Callable[[float], Awaitable[None]]) -> None:
        self._kv, self._wait = kv, wait

    async def read(self) -> Turns:
        return (await self._read())[0]

    async def change(self, apply: Callable[[Turns], T]) -> T:
        """Apply the change, and return what `apply` does once it is stored. Raises what `apply` does."""
        while True:
            turns, revision = await self._read()
            before = turns.dump()
            result = apply(turns)
            data = turns.dump()
            if data == before:
                return result
            try:
                if revision is None:
                    await self._kv.create(KEY, data)
                else:
                    await self._kv.update(KEY, data, revision)
                return result
            except (Conflict, KeyExists):  # somebody was faster: look again
                continue
            except TransportError as error:
                await self._away(error)

    async def _read(self) -> tuple[Turns, int | None]:
        while True:
            try:
                entry = await self._kv.get(KEY)
            except TransportError as error:
                await self._away(error)
                continue
            return (Turns(), None) if entry is None else (Turns.load(entry[0]), entry[1])

    async def _away(self, error: TransportError) -> None:
        if isinstance(error, AccessDenied | BucketMissing):
            raise error
        log.warning("the table of turns cannot be reached: %s", error)
        await self._wait(RETRY_S)
