"""What a launcher tells is on record as soon as the broker can store it, with the time at which it happened."""

from __future__ import annotations

import time

import pytest

from services.controller.launchers import telling
from services.controller.launchers.telling import Teller
from shared.errors import PublishTimeout, StorageExhausted
from shared.records import Event
from shared.subjects import Subjects
from tests.shared.runs import until


class Queue:
    """Stores nothing until it has failed in every way that passes."""

    def __init__(self) -> None:
        self.failures = [StorageExhausted("url", "subject", "full"), PublishTimeout("subject", 1.0, "no answer")]
        self.stored: list[tuple[str, Event]] = []

    async def publish(self, subject: str, event: Event) -> None:
        if self.failures:
            raise self.failures.pop()
        self.stored.append((subject, event))


class Run:
    """As much of one as is needed."""

    def __init__(self) -> None:
        self.queue, self.subjects = Queue(), Subjects("run")


async def test_events_wait_for_a_broker_that_cannot_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telling, "RETRY_S", 0.01)
    run = Run()
    teller = Teller(run)  # type: ignore[arg-type]
    before = time.time()
    teller.tell("up", "up", "disk_full", "no room", free=1)
    told = time.time()
    await until(lambda: run.queue.stored, "it is stored")
    ((subject, event),) = run.queue.stored
    assert subject == run.subjects.events("up")
    assert (event.kind, event.detail) == ("disk_full", {"by": "up", "free": 1})
    assert before <= event.at <= told, "when it happened, not when it was stored"
    await teller.close()
