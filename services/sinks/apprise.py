"""Notifications of a run's events, over whatever Apprise can reach: mail, chat, pagers. Needs the package apprise.

Only events that happen from the start of the sink on. Not more than `PER_MINUTE` messages in a minute: what comes beyond is
counted, and the next message says how many were left out. A service that cannot be reached is logged and costs only its
message. `Pace` is pure. tests/sinks/test_sinks.py.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import apprise

from services.sinks.follow import Told
from shared.records import Event

log = logging.getLogger(__name__)

KINDS = ("run_finished", "run_failed", "failed", "exit", "hung", "disk_full", "broker", "rollback", "scaled")
"""Told of, if nothing else is asked for."""
PER_MINUTE = 10


class Pace:
    """So many in a minute."""

    def __init__(self, most: int) -> None:
        self.most, self.left_out = most, 0
        self._sent: deque[float] = deque()

    def allows(self, now: float) -> bool:
        """Whether one may go out now; if not, it is counted."""
        while self._sent and self._sent[0] <= now - 60.0:
            self._sent.popleft()
        if len(self._sent) >= self.most:
            self.left_out += 1
            return False
        self._sent.append(now)
        return True

    def skipped(self) -> int:
        """How many were left out since the last call."""
        count, self.left_out = self.left_out, 0
        return count


class Notifier:
    """Sends what it is given of `kinds` to all of `urls`. ValueError names a URL that Apprise does not know."""

    def __init__(
        self,
        run: str,
        urls: Sequence[str],
        kinds: Collection[str] = KINDS,
        *,
        since: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.kinds, self._clock = run, frozenset(kinds), clock
        self._since = time.time() if since is None else since
        self._pace = Pace(PER_MINUTE)
        self._apprise = apprise.Apprise()
        for url in urls:
            if not self._apprise.add(url):
                scheme = url.partition(":")[0]
                raise ValueError(f"--to {scheme}:...: Apprise does not know this kind of URL, or it is incomplete")

    def take(self, batch: list[Told]) -> None:
        for told in batch:
            if isinstance(told.record, Event) and self._wanted(told.record) and self._pace.allows(self._clock()):
                self._send(told.record)

    def close(self) -> None:
        """What the pace held back is told in one line."""
        if count := self._pace.skipped():
            self._notify(f"{self.run}: {count} more events", f"`slipstream events --run {self.run}` lists them")

    def _wanted(self, event: Event) -> bool:
        return event.kind in self.kinds and event.at >= self._since

    def _send(self, event: Event) -> None:
        skipped = self._pace.skipped()
        rest = f"\n({skipped} events before it were not sent)" if skipped else ""
        self._notify(f"{self.run}: {event.kind} ({event.replica})", f"{event.message}{rest}")

    def _notify(self, title: str, body: str) -> None:
        if not self._apprise.notify(title=title, body=body):
            log.warning("not everybody could be told: %s", title)
