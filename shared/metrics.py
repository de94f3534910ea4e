"""How a service tells the world what it does: metrics (may be lost, never wait) and events (kept, never lost).

Cumulative counters end in `_s` (seconds) or `_total`; everything else is the value at that moment. `docs/metrics.md` lists them.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from shared.records import Event, Metric
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue

log = logging.getLogger(__name__)


class Metrics:
    """Emits this replica's numbers; `busy()` and `wait(what)` add up where its time goes."""

    def __init__(self, queue: TransferQueue, subjects: Subjects, service: str, replica: str) -> None:
        self._queue, self._subject = queue, subjects.metrics(service, replica)
        self._service, self._replica = service, replica
        self._clocks: dict[str, float] = defaultdict(float)
        self._process = psutil.Process()
        self._children_s: dict[int, float] = {}

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Time in here counts as work: `busy_s`."""
        with self._clock("busy_s"):
            yield

    @contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """Time in here counts as waiting for `what`: `wait_s.<what>`."""
        with self._clock(f"wait_s.{what}"):
            yield

    def add(self, clock: str, seconds: float) -> None:
        """For clocks that no `with` can keep: `busy_s`, or `wait_s.<what>`."""
        self._clocks[clock] += seconds

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.add(name, time.monotonic() - started)

    def emit(self, step: int | None = None, **values: float) -> None:
        """Publish `values` with the clocks and the CPU seconds of this process and its children so far."""
        clean = {key: float(value) for key, value in values.items()}
        self._queue.emit(
            self._subject,
            Metric(
                service=self._service,
                replica=self._replica,
                step=step,
                values={**self._clocks, "cpu_s": self._cpu_seconds(), **clean},
                at=time.time(),
            ),
        )

    def _cpu_seconds(self) -> float:
        """Of this process and its children, dead ones included as far as they were seen alive."""
        own = self._process.cpu_times()
        for child in self._process.children(recursive=True):
            try:
                times = child.cpu_times()
            except psutil.Error:  # gone between the listing and the look: its last reading stands
                continue
            self._children_s[child.pid] = times.user + times.system
        return own.user + own.system + sum(self._children_s.values())


class Events:
    """Publishes events of one replica and writes each to the log too."""

    def __init__(self, queue: TransferQueue, subjects: Subjects, service: str, replica: str) -> None:
        self._queue, self._subject = queue, subjects.events(service)
        self._service, self._replica = service, replica

    async def publish(self, kind: str, message: str, **detail: Any) -> None:
        log.info("%s: %s %s", kind, message, detail or "")
        event = Event(self._service, self._replica, kind, message, detail, time.time())
        await self._queue.publish(self._subject, event)
