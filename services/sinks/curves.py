"""Curves over the run's step, for sinks that draw them. Pure; tests/sinks/test_curves.py.

What was said of a step is a point at that step. What a replica says in between, with no step, is thinned: its newest values
become points when the run comes to its next step, so that a thousand messages between two updates are one point; `flush` gives
the last ones. Names are `service/metric`, or `service/metric/replica` where a service may have several replicas. Values that
are no numbers (nothing was scored) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shared.records import Metric

SINGLE = frozenset({"controller", "dcs", "trainer"})
"""One of them is active: a replica that takes over goes on with the curve."""


@dataclass(frozen=True, slots=True)
class Point:
    name: str
    step: int
    value: float
    at: float


class Curves:
    """Feed it the metrics of one run, in order."""

    def __init__(self) -> None:
        self.step = 0
        """The newest that anybody named."""
        self._waiting: dict[str, tuple[float, float]] = {}

    def add(self, metric: Metric) -> list[Point]:
        """The points that are complete now."""
        points: list[Point] = []
        if metric.step is None:
            for name, value in named(metric):
                self._waiting[name] = (value, metric.at)
        else:
            if metric.step != self.step:
                points += self.flush()
                self.step = metric.step
            points += [Point(name, metric.step, value, metric.at) for name, value in named(metric)]
        return points

    def flush(self) -> list[Point]:
        """What waits for the end of its step."""
        waiting, self._waiting = self._waiting, {}
        return [Point(name, self.step, value, at) for name, (value, at) in waiting.items()]


def named(metric: Metric) -> Iterable[tuple[str, float]]:
    """(name of the curve, value)."""
    tail = "" if metric.service in SINGLE else f"/{metric.replica}"
    for name, value in metric.values.items():
        if math.isfinite(value):
            yield f"{metric.service}/{name}{tail}", value
