"""Events of a launcher, told in the background: whoever restarts things must not wait for a broker that it may restart itself.

An event waits for a broker that is away, or has no room, for as long as the launcher lives. tests/controller/test_telling.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from services.controller.attach import Run
from shared.errors import PublishTimeout, StorageExhausted, TransportError
from shared.records import Event

log = logging.getLogger(__name__)

LAST_S = 5.0
"""How long the last events may take at the end."""
RETRY_S = 1.0


class Teller:
    """`tell` returns at once; the event carries the time of that call and is stored as soon as the broker can."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._tasks: set[asyncio.Task[None]] = set()

    def tell(self, service: str, replica: str, kind: str, message: str, **detail: Any) -> None:
        """An event of `replica`, told by the launcher."""
        log.info("%s %s: %s %s", replica, kind, message, detail or "")
        event = Event(service, replica, kind, message, {"by": "up", **detail}, time.time())
        task = asyncio.create_task(self._publish(event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give the last events a moment."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_S)
        for task in self._tasks:
            task.cancel()

    async def _publish(self, event: Event) -> None:
        subject = self._run.subjects.events(event.service)
        while True:
            try:
                await self._run.queue.publish(subject, event)
                return
            except (PublishTimeout, StorageExhausted) as error:
                log.info("an event waits for the broker: %s", error)
                await asyncio.sleep(RETRY_S)
            except TransportError as error:
                log.warning("an event is not on record: %s (%s)", event, error)
                return
