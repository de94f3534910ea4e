"""Prometheus' text format of a run's newest metrics. Pure but for the lock; tests/sinks/test_prometheus.py.

`slipstream_<service>_<metric>{run,replica}`; names, kinds and help come from shared/metric_names.py. Counters end in `_total`,
seconds in `_seconds`; a family such as `wait_s.*` is one metric with the label `of`. Counters are passed on as they come: one
that began anew is what Prometheus' own functions expect. Replicas that have said nothing for `FORGET_S` are left out.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.sinks.follow import Told
from shared.metric_names import DECLARED, Declared, find
from shared.records import Event, Metric
from shared.transfer_queue import StreamDepth

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FORGET_S = 300.0
_TOTALS = {(service, one.name) for one in DECLARED for service in one.services}


Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Labels
    value: float


@dataclass(slots=True)
class Shown:
    """One metric's lines."""

    kind: str
    help: str
    samples: list[Sample] = field(default_factory=list)


class Exposition:
    """A sink; `render` may be called from another thread."""

    def __init__(self, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.run, self._clock = run, clock
        self._newest: dict[tuple[str, str], tuple[dict[str, float], float]] = {}
        self._events: Counter[tuple[str, str]] = Counter()
        self._depths: dict[str, StreamDepth] = {}
        self._lock = threading.Lock()

    def take(self, batch: list[Told]) -> None:
        with self._lock:
            for told in batch:
                if isinstance(told.record, Event):
                    self._events[told.record.service, told.record.kind] += 1
                else:
                    self._take(told.record)

    def _take(self, metric: Metric) -> None:
        """A replica has several kinds of messages: each keeps its newest value."""
        before = self._newest.get((metric.service, metric.replica), ({}, 0.0))[0]
        step = {} if metric.step is None else {"step": float(metric.step)}
        self._newest[metric.service, metric.replica] = (before | metric.values | step, self._clock())

    def note(self, depths: dict[str, StreamDepth]) -> None:
        """How full the streams are."""
        with self._lock:
            self._depths = depths

    def close(self) -> None:
        """Nothing is held."""

    def render(self) -> str:
        with self._lock:
            shown = self._collect()
        return "".join(line for name, one in sorted(shown.items()) for line in _lines(name, one))

    def _collect(self) -> dict[str, Shown]:
        shown: dict[str, Shown] = {}
        alive: Counter[str] = Counter()
        oldest = self._clock() - FORGET_S
        for (service, replica), (values, heard) in sorted(self._newest.items()):
            if heard < oldest:
                continue
            alive[service] += 1
            for name, value in values.items():
                full, kind, text, of = described(service, name)
                labels = (("run", self.run), ("replica", replica), *((("of", of),) if of else ()))
                shown.setdefault(full, Shown(kind, text)).samples.append(Sample(labels, value))
        for name, text, found in self._own(alive):
            one = shown.setdefault(name, Shown("counter" if name.endswith("_total") else "gauge", text))
            one.samples += [Sample((("run", self.run), *labels), value) for labels, value in found]
        return shown

    def _own(self, alive: Counter[str]) -> Iterator[tuple[str, str, list[tuple[Labels, float]]]]:
        """What this sink adds."""
        found: list[tuple[Labels, float]] = []
        for (service, kind), count in self._events.items():
            found.append(((("service", service), ("kind", kind)), float(count)))
        yield "slipstream_events_total", "events since the stream's beginning", found
        yield (
            "slipstream_replicas",
            "replicas heard of",
            [((("service", name),), float(n)) for name, n in alive.items()],
        )
        for what, text in (("messages", "messages in the stream"), ("pending", "not yet handed to a consumer")):
            depths = self._depths.items()
            yield f"slipstream_queue_{what}", text, [((("stream", name),), getattr(one, what)) for name, one in depths]


def described(service: str, name: str) -> tuple[str, str, str, str]:
    """(Prometheus' name, kind, help, label `of`) of a metric that `service` emitted."""
    declared = find(service, name)
    if name == "step":
        return f"slipstream_{service}_step", "gauge", "updates done", ""
    if declared is None:
        return f"slipstream_{service}_{_token(name)}", "untyped", "not declared", ""
    of = name.partition(".")[2] if declared.family else ""
    return f"slipstream_{service}_{exposed(declared, service)}", declared.kind, f"{declared.help} ({declared.unit})", of


def exposed(declared: Declared, service: str) -> str:
    """The metric's own part of the name, with its unit as Prometheus writes it."""
    base = declared.family or declared.name
    total = declared.kind == "counter"
    base = base.removesuffix("_total") if total else base
    if base.endswith("_s") and declared.unit == "seconds":
        base = f"{base[:-2]}_seconds"
    if declared.family and (service, f"{declared.family}_total") in _TOTALS:
        return f"{base}_by_reason_total"
    return f"{base}_total" if total else base


def _lines(name: str, one: Shown) -> Iterator[str]:
    if not one.samples:
        return
    text = one.help.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {text}\n# TYPE {name} {one.kind}\n"
    for sample in one.samples:
        labels = ",".join(f'{key}="{_escape(value)}"' for key, value in sample.labels)
        yield f"{name}{{{labels}}} {_number(sample.value)}\n"


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _token(name: str) -> str:
    return "".join(char if char.isascii() and char.isalnum() else "_" for char in name)
