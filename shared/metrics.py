"""How a service tells the world what it does: metrics (may be lost, never wait) and events (kept, never lost).

Names, kinds and units are declared in shared/metric_names.py, and only there; `docs/metrics.md` lists them.
"""

from __future__ import annotations

import logging
import os
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

LOOK_S = 2.0
"""Living children are looked for no more often: it means reading about every process of the machine."""


class Metrics:
    """Emits this replica's numbers; `busy()` and `wait(what)` add up where its time goes."""

    def __init__(self, queue: TransferQueue, subjects: Subjects, service: str, replica: str) -> None:
        self._queue, self._subject = queue, subjects.metrics(service, replica)
        self._service, self._replica = service, replica
        self._clocks: dict[str, float] = defaultdict(float)
        self._cpu = CpuClock()

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
                values={**self._clocks, "cpu_s": self._cpu.seconds(), **clean},
                at=time.time(),
            ),
        )


class CpuClock:
    """CPU seconds of this process and all its children, and theirs. Never falls; a living child's share is up to LOOK_S old."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._looked = float("-inf")
        self._living_s = self._ended_s = self._most = 0.0

    def seconds(self) -> float:
        times = os.times()
        ended_s = times.children_user + times.children_system
        if ended_s != self._ended_s or time.monotonic() - self._looked > LOOK_S:
            self._living_s, self._ended_s, self._looked = self._look(), ended_s, time.monotonic()
        self._most = max(self._most, times.user + times.system + ended_s + self._living_s)
        return self._most

    def _look(self) -> float:
        total = 0.0
        for child in self._process.children(recursive=True):
            try:
                total += sum(child.cpu_times()[:4])  # user, system, and those of its own children that ended
            except psutil.Error:  # gone between the listing and the look: counted with the ended ones from now on
                log.debug("process %d has just ended", child.pid)
        return total


class Events:
    """Publishes events of one replica and writes each to the log too."""

    def __init__(self, queue: TransferQueue, subjects: Subjects, service: str, replica: str) -> None:
        self._queue, self._subject = queue, subjects.events(service)
        self._service, self._replica = service, replica

    async def publish(self, kind: str, message: str, **detail: Any) -> None:
        log.info("%s: %s %s", kind, message, detail or "")
        event = Event(self._service, self._replica, kind, message, detail, time.time())
        await self._queue.publish(self._subject, event)
