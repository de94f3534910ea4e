"""Events of a launcher, told in the background: whoever restarts things must not wait for a broker that it may restart itself."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from services.controller.attach import Run
from shared.errors import TransportError
from shared.metrics import Events

log = logging.getLogger(__name__)

LAST_S = 5.0
"""How long the last events may take at the end."""


class Teller:
    """`tell` returns at once; the event carries the time of that call and is stored as soon as the broker can."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, service: str, replica: str, kind: str, message: str, **detail: Any) -> None:
        """An event of `replica`, told by the launcher."""
        events = Events(self._run.queue, self._run.subjects, service, replica)
        task = asyncio.create_task(_publish(events, kind, message, {"by": "up", **detail}))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give the last events a moment."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_S)
        for task in self._tasks:
            task.cancel()


async def _publish(events: Events, kind: str, message: str, detail: dict[str, Any]) -> None:
    try:
        await events.publish(kind, message, **detail)
    except TransportError as error:
        log.warning("an event is not on record: %s", error)
