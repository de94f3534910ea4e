"""What a run looks like while it runs: a live screen on a terminal, one line a step elsewhere.

`RunView` is pure: records go in through `apply`, `render` and `step_lines` read it. It is fed by subscribing only, so the same
view works beside a run that somebody else started. `follow` is the I/O. `tests/controller/test_view.py` feeds it records.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Group as Rows
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shared.columns import stages
from shared.config import RunConfig
from shared.errors import TransportError
from shared.ledger import Ledger
from shared.records import Event, Heartbeat, Metric, Receipt
from shared.wire import UNFIT, decode

if TYPE_CHECKING:
    from shared.registry import Registry
    from shared.transfer_queue import TransferQueue

log = logging.getLogger(__name__)

BLOCKS = "▁▂▃▄▅▆▇█"
PACE_STEPS = 20
"""Updates whose mean pace gives the time left."""
TOKEN_WINDOW_S = 20.0
LEAST_WINDOW_S = 1.0
EVENTS_SHOWN = 6
TRAINER_VALUES = ("loss", "grad_norm", "lr")
REFRESH_S = 0.5
POLL_S = 2.0


class RunView:
    """The state of the screen."""

    def __init__(self, config: RunConfig) -> None:
        self.run, self.steps, self.groups = config.run, config.steps, config.groups_per_step
        self.bound = config.max_staleness
        self.ledger = Ledger()
        self.rewards: dict[int, list[float]] = {}
        self.ages: dict[int, Counter[int]] = {}
        self.tokens: deque[tuple[float, int]] = deque()
        self.values: dict[str, float] = {}
        self.events: deque[Event] = deque(maxlen=EVENTS_SHOWN)
        self.replicas: list[Heartbeat] = []
        self.depths: dict[str, int] = {}
        self._queues = ("prompts", "rewards", *stages(config), "advantages")
        self.phase = "starting"
        self.waits_for: list[str] = []
        """Replicas that died and are not back, if the view is told."""
        self._receipts_seen = 0
        self._news = asyncio.Condition()
        self._ends: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS + 1)
        self._lines: list[tuple[float, str]] = []

    @property
    def done(self) -> int:
        """Updates that are complete."""
        return self._ends[-1][0] + 1 if self._ends else 0

    def apply(self, record: Receipt | Metric | Event) -> None:
        if isinstance(record, Event):
            self.events.append(record)
        elif isinstance(record, Metric):
            if record.service == "trainer":
                self.values.update(record.values)
        elif self.ledger.apply(record):
            self._receipt(record)

    async def saw(self, seq: int) -> None:
        """The receipts up to `seq` are folded."""
        async with self._news:
            self._receipts_seen = seq
            self._news.notify_all()

    async def seen(self, seq: int) -> None:
        """Wait until the receipts up to `seq` are folded."""
        async with self._news:
            await self._news.wait_for(lambda: self._receipts_seen >= seq)

    def note(self, replicas: list[Heartbeat]) -> None:
        """Who is alive now. Before the first update the trainer's state says what the run is doing."""
        self.replicas = replicas
        if not self.done:
            self.phase = next((beat.state for beat in replicas if beat.service == "trainer"), self.phase)

    def _receipt(self, receipt: Receipt) -> None:
        if receipt.kind == "rollback":
            for step in [step for step in self.rewards if step >= receipt.step]:
                del self.rewards[step], self.ages[step]
            self._ends = deque((end for end in self._ends if end[0] < receipt.step), maxlen=PACE_STEPS + 1)
        if receipt.kind != "trained":
            return
        rewards, ages = self.rewards.setdefault(receipt.step, []), self.ages.setdefault(receipt.step, Counter())
        if receipt.reward is not None:
            rewards.append(receipt.reward)
        if receipt.sample_steps is not None:
            ages.update(
                receipt.step - oldest for oldest in receipt.sample_steps.tolist() if 0 <= oldest <= receipt.step
            )
        self.tokens.append((receipt.at, receipt.tokens))
        while self.tokens and self.tokens[0][0] < receipt.at - TOKEN_WINDOW_S:
            self.tokens.popleft()
        if len(self.ledger.by_step.get(receipt.step, [])) == self.groups:
            self._ends.append((receipt.step, receipt.at))
            self.phase = "training"
            self._lines.append((receipt.at, self._line(receipt.step)))

    def tokens_per_second(self) -> float | None:
        """Trained completion tokens over the last seconds; None while that is too short a time to tell."""
        elapsed = self.tokens[-1][0] - self.tokens[0][0] if self.tokens else 0.0
        if elapsed < LEAST_WINDOW_S:
            return None
        return sum(count for at, count in self.tokens if at > self.tokens[0][0]) / elapsed

    def seconds_left(self) -> float | None:
        """At the pace of the last updates; None while there is none."""
        if len(self._ends) < 2:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        return (self.steps - last - 1) * (ended - began) / max(last - first, 1)

    def curve(self, width: int) -> str:
        """The reward of the updates as blocks, 0 at the bottom, 1 (or the highest) at the top."""
        points = [fmean(self.rewards[step]) for step in sorted(self.rewards) if self.rewards[step]]
        if not points:
            return ""
        columns = min(width, len(points))
        edges = [round(column * len(points) / columns) for column in range(columns + 1)]
        means = [fmean(points[left:right]) for left, right in pairwise(edges)]
        low, high = min(0.0, *means), max(1.0, *means)
        return "".join(BLOCKS[min(7, int((mean - low) / (high - low) * 8))] for mean in means)

    def step_lines(self) -> list[tuple[float, str]]:
        """(when, line) of each update that was completed since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def _line(self, step: int) -> str:
        rewards, ages = self.rewards[step], self.ages[step]
        left = self.seconds_left()
        parts = [
            f"step {step + 1}/{self.steps}",
            f"reward {fmean(rewards):.3f}" if rewards else "reward none",
            f"age {max(ages, default=0)}/{self.bound}",
            self._speed(),
            f"in flight {self.ledger.pending}",
        ]
        if dropped := self.ledger.dropped.total():
            parts.append(f"dropped {dropped}")
        if left is not None:
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)

    def _speed(self) -> str:
        rate = self.tokens_per_second()
        return "- tokens/s" if rate is None else f"{rate:.0f} tokens/s"

    def render(self, now: float, width: int = 100) -> Panel:
        left = self.seconds_left()
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {self.done}/{self.steps}", style="bold"),
            ProgressBar(total=self.steps, completed=self.done, width=max(10, width // 3)),
            self._outlook(left),
        )
        rows: list[Any] = [head, self._numbers(), self._reward_row(width), self._replica_table(now)]
        rows += [Text(event_line(event), overflow="ellipsis", no_wrap=True, style="dim") for event in self.events]
        return Panel(Rows(*rows), title=f"slipstream · {self.run}", title_align="left")

    def _outlook(self, left: float | None) -> Text:
        if self.waits_for:
            return Text(f"waiting for {', '.join(self.waits_for)}", style="yellow")
        return Text(self.phase if left is None or self.done >= self.steps else f"{duration(left)} left")

    def _reward_row(self, width: int) -> Text:
        steps = [step for step in self.rewards if self.rewards[step]]
        newest = f"{fmean(self.rewards[max(steps)]):.3f}" if steps else "-"
        return Text(f"reward {newest}  {self.curve(max(10, width - 24))}", style="green", no_wrap=True)

    def _numbers(self) -> Text:
        ages = self.ages.get(max(self.ages, default=-1), Counter())
        spread = " ".join(f"{age}:{count}" for age, count in sorted(ages.items())) or "-"
        parts = [
            f"age of samples {spread} (bound {self.bound})",
            self._speed(),
            f"in flight {self.ledger.pending}",
            "queues " + " ".join(f"{name} {self.depths.get(name, 0)}" for name in self._queues),
        ]
        if self.ledger.dropped:
            parts.append("dropped " + " ".join(f"{reason} {n}" for reason, n in self.ledger.dropped.items()))
        parts += [f"{name} {self.values[name]:.3g}" for name in TRAINER_VALUES if name in self.values]
        return Text("  ".join(parts))

    def _replica_table(self, now: float) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("replica", "state", "weights of step", "done", "heard"):
            table.add_column(name, justify="right" if name in ("weights of step", "done") else "left")
        for beat in sorted(self.replicas, key=lambda beat: (beat.service, beat.replica)):
            step = str(beat.step) if beat.step >= 0 else ""
            table.add_row(beat.replica, beat.state, step, str(beat.progress), f"{max(0.0, now - beat.at):.0f} s ago")
        return table


def event_line(event: Event) -> str:
    """An event in one line, local time first."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.at))
    detail = " ".join(f"{key}={value}" for key, value in event.detail.items())
    return f"{clock} {event.replica or event.service} {event.kind}: {event.message}" + (
        f" ({detail})" if detail else ""
    )


def duration(seconds: float) -> str:
    """`95` is `1 min 35 s`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


async def follow(view: RunView, queue: TransferQueue, registry: Registry, show: Callable[[], None]) -> None:
    """Feed the view from the run's streams and call `show` twice a second, until cancelled."""
    async with asyncio.TaskGroup() as tasks:
        for stream, record in (("receipts", Receipt), ("events", Event), ("metrics", Metric)):
            tasks.create_task(_subscribe(view, queue, stream, record))
        tasks.create_task(_poll(view, queue, registry))
        while True:
            show()
            await asyncio.sleep(REFRESH_S)


async def _subscribe(view: RunView, queue: TransferQueue, stream: str, record: type[Any]) -> None:
    async for data, seq in queue.read(stream, live=True):
        if data is not UNFIT:
            view.apply(decode(data, record))
        if record is Receipt:
            await view.saw(seq)


async def _poll(view: RunView, queue: TransferQueue, registry: Registry) -> None:
    """What no stream tells: who is alive and how deep the queues are."""
    while True:
        try:
            view.note(await registry.alive())
            view.depths = {name: depth.messages for name, depth in (await queue.depths()).items()}
        except TransportError as error:
            log.debug("the broker does not answer: %s", error)
        await asyncio.sleep(POLL_S)
