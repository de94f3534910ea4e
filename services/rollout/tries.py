"""How often a suspect was drawn alone, so that a group goes to the dead letters only for what it did itself.

The broker counts a delivery for every group that a dead replica had in hand, also for those that only waited there. A group
that was delivered too often is therefore buried only if it was drawn alone (caution.py) at least `ENOUGH` times without coming
through; until then it gets its try. The count is in the run's KV, written before the draw, so that it outlives whoever draws.
tests/rollout/test_tries.py, tests/chaos/test_faults.py.
"""

from __future__ import annotations

import logging

from shared.errors import TransportError
from shared.kv import KV
from shared.pull import Delivery

log = logging.getLogger(__name__)

ENOUGH = 2
LAST_RESORT = 3
"""So many times `max_deliveries` the queue buries it in any case: something must end what never even comes to be drawn."""


class Tries:
    """Of one replica; all replicas see the same counts."""

    def __init__(self, kv: KV, max_deliveries: int) -> None:
        self._kv, self._most = kv, max_deliveries

    async def verdict(self, delivery: Delivery) -> str:
        """Why it must be buried, or ''."""
        if delivery.delivered <= self._most:
            return ""
        try:
            tried = await self._count(delivery.msg_id)
        except TransportError as error:
            log.warning("%s gets another try: %s", delivery.msg_id, error)
            return ""
        if tried < ENOUGH:
            return ""
        return (
            f"delivered {delivery.delivered} times, at most {self._most} are allowed; {tried} times it was drawn alone"
        )

    async def begin(self, group_id: str) -> None:
        """It is about to be drawn alone."""
        await self._kv.put(_key(group_id), str(await self._count(group_id) + 1).encode())

    async def came_through(self, group_id: str) -> None:
        """The key stays: who may delete one may delete all of the run's config, and a rollout replica may not."""
        await self._kv.put(_key(group_id), b"0")

    async def _count(self, group_id: str) -> int:
        entry = await self._kv.get(_key(group_id))
        return 0 if entry is None else int(entry[0])


def _key(group_id: str) -> str:
    return f"tries.{group_id}"
