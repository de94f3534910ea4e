"""Puts on record what a service's queue had to do twice: messages that came again, and those that went to the dead letters.

A killed consumer's messages come again by the dozen, so they are told together, once a second at most: one `redelivered` event
with stage, count, the first ids and the highest count of deliveries. Each buried group is a `dropped` event of its own, as any
other drop. tests/shared/test_deliveries.py.
"""

from __future__ import annotations

import asyncio
import logging

from shared.errors import TransportError
from shared.metrics import Events

log = logging.getLogger(__name__)

TOGETHER_S = 1.0
IDS = 20
"""Ids that an event names."""


class Deliveries:
    """Collects; `tell` is the task that publishes."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._again: dict[str, list[tuple[str, int]]] = {}
        self._news = asyncio.Event()

    def came_again(self, stage: str, group_id: str, delivered: int) -> None:
        self._again.setdefault(stage, []).append((group_id, delivered))
        self._news.set()

    async def buried(self, stage: str, group_id: str, delivered: int, why: str) -> None:
        """Called before the message is acknowledged, so that no drop goes unrecorded."""
        await self._events.publish(
            "dropped",
            f"{group_id}: dead:{stage}: {why}",
            group=group_id,
            reason=f"dead:{stage}",
            why=why,
            deliveries=delivered,
        )

    async def tell(self) -> None:
        """For ever."""
        while True:
            await self._news.wait()
            await asyncio.sleep(TOGETHER_S)
            self._news.clear()
            await self.flush()

    async def flush(self) -> None:
        """What is collected, now."""
        again, self._again = self._again, {}
        for stage, messages in again.items():
            ids = sorted({group_id for group_id, _ in messages})
            most = max(delivered for _, delivered in messages)
            text = f"{len(messages)} messages for {stage} came again, up to the {most}. time"
            try:
                await self._events.publish(
                    "redelivered", text, stage=stage, count=len(messages), groups=ids[:IDS], most=most
                )
            except TransportError as error:
                log.warning("not on record: %s (%s)", text, error)
