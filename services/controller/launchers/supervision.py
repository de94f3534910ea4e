"""When a service is started again, when one that hangs is replaced, and when the run is given up. Pure: no processes, no clock.

In go starts, exits and heartbeats, with the caller's own steady time; out come decisions, for one replica at a time: nobody else
is ever restarted. Rules, held by tests/controller/test_supervision.py:

- A death is answered with a restart: at once the first time, then after 1, 2, 4 ... seconds, up to `longest_s`. A replica that
  worked for `steady_s` begins anew. One that dies again and again without that is reported once.
- Its own report of a failure (exit code 1) counts towards `failures`; as many of them, without getting any further in between,
  give the run up. A wrong config (2) gives it up at once: it would be as wrong the next time.
- No broker (3) and a role that another process holds (4) are waited for, however long; said once.
- A process that lives without a new heartbeat for `silent_s`, or does not show its first within `start_s`, is to be killed; one
  that was not steady in between gets twice as long each time, lest a slow machine be taken for a hang for ever. Only time in
  which the registry could be read counts, and after a time in which it could not be everybody's silence begins anew, since what
  they wrote is lost; so neither a broker that is away nor a launcher that slept (shared/awake.py) accuses anybody.
  Heartbeats are compared, never dated: the clocks of other processes do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shared.awake import Awake
from shared.records import Heartbeat

START_STATES = frozenset(
    {
        "",
        "starting",
        "loading model",
        "fetching weights",
        "waiting for weights",
        "starting engine",
        "waiting for engine",
    }
)
"""States of a replica that has not come up yet."""
KEEPS_PROGRESS = frozenset({"trainer"})
"""Services whose progress outlives a process, so that getting further means passing the best of all processes."""
MAY_LEAVE = frozenset({"reference", "reward", "rollout", "teacher"})
"""Services of which a replica may be stopped on purpose while the run goes on."""
SAID_AFTER = 3
"""Deaths in a row, until it is said that the replica does not stay up."""
CONFIG, BROKER, ACTIVE = 2, 3, 4
"""Exit codes of shared/service.py."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The numbers."""

    silent_s: float
    """The run's heartbeat_ttl_s."""
    start_s: float = 180.0
    first_s: float = 0.1
    back_off_s: float = 1.0
    longest_s: float = 30.0
    patient_s: float = 5.0
    """The longest pause before asking again for a broker or a role."""
    steady_s: float = 20.0
    failures: int = 3
    look_s: float = 5.0
    """The most that one look at the registry may add to a silence, if that is less than a third of what is allowed: whoever looks
    less often was asleep, and there may be news that the next look brings."""


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after `delay_s`. `say` is news for people, '' if there is none."""

    delay_s: float
    cause: str
    attempt: int
    say: str = ""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The run cannot go on."""

    why: str


@dataclass(frozen=True, slots=True)
class Left:
    """It was asked to go, and is not started again."""

    say: str


Decision = Restart | GiveUp | Left


@dataclass(frozen=True, slots=True)
class Hung:
    """Kill this process; its exit then brings it back."""

    replica: str
    cause: str


@dataclass(frozen=True, slots=True)
class Back:
    """A replica works again."""

    replica: str
    pid: int
    down_s: float
    """From its death to the first heartbeat of work."""


@dataclass(slots=True)
class Watched:
    """What is known of one replica."""

    service: str
    phase: Literal["starting", "working", "dead", "left"] = "starting"
    pid: int = 0
    started: float = 0.0
    up_since: float = 0.0
    due: float = 0.0
    died: float | None = None
    """None once it is back."""
    deaths: int = 0
    """In a row."""
    failures: int = 0
    reached: int = -1
    """The progress at the last failure."""
    peak: int = -1
    silent_s: float = 0.0
    heard: Heartbeat | None = None
    """The newest heartbeat of this process."""
    hangs: int = 0
    """Accusations since it was steady."""
    accused: str = ""
    """Why it was to be killed."""
    cause: str = ""
    """Of its last death."""
    released: bool = False
    """It was asked to leave: its end is no death."""
    told: set[str] = field(default_factory=set)
    """Topics of news that were told and still hold."""


class Supervisor:
    """One run's replicas on one launcher."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.watched: dict[str, Watched] = {}
        self._awake = Awake(min(rules.look_s, rules.silent_s / 3))

    def started(self, service: str, replica: str, pid: int, now: float) -> None:
        """A process was started for it."""
        one = self.watched.setdefault(replica, Watched(service))
        one.phase, one.pid, one.started = "starting", pid, now
        one.silent_s, one.heard, one.accused, one.released = 0.0, None, "", False

    def release(self, replica: str) -> bool:
        """It is to leave, and not to be started again. True if its process may still be there."""
        one = self.watched.get(replica)
        if one is None or one.phase == "left":
            return False
        there = one.phase != "dead"
        one.released, one.phase = True, one.phase if there else "left"
        return there

    def placed(self, replica: str, pid: int, now: float) -> None:
        """A process whose pid was not known when it was started: a cluster had to find room for it first."""
        one = self.watched[replica]
        if not one.pid and one.phase != "left":
            one.pid, one.started = pid, now

    def left(self, replica: str) -> None:
        """It will not be started again."""
        self.watched[replica].phase = "left"

    def exited(self, replica: str, code: int, how: str, now: float) -> Decision:
        """Its process ended, while the run is not over. `code` below 0 is a signal."""
        one = self.watched[replica]
        if one.released:
            one.phase, one.died = "left", None
            return Left("")
        steady = one.phase == "working" and now - one.up_since - one.silent_s >= self.rules.steady_s
        if one.died is None:
            one.died = now
        one.phase = "dead"
        if steady:
            one.deaths = one.hangs = 0
            one.told.clear()
        one.deaths += 1
        if code == 0 and one.service in MAY_LEAVE:
            one.phase = "left"
            return Left(self._leaving(replica, one.service))
        one.cause = cause = one.accused or how
        if code == CONFIG:
            return GiveUp(f"{replica} cannot use the config: {how}")
        if code in (BROKER, ACTIVE):
            text = "cannot reach the broker" if code == BROKER else "finds its role taken by another process"
            say = self._once(one, text, f"{replica} {text}; it is tried again until that ends")
            return self._again(one, now, cause, self.rules.patient_s, say)
        if code > 0 and self._fails(one, steady):
            return GiveUp(f"{replica} failed {self.rules.failures} times without getting any further: {how}")
        say = f"{replica} does not stay up ({cause}); it is tried again and again, and the run waits for it"
        say = self._once(one, "does not stay up", say) if one.deaths >= SAID_AFTER else ""
        return self._again(one, now, cause, self.rules.longest_s, say)

    def heard(self, beat: Heartbeat, now: float) -> Back | None:
        """A heartbeat as it stands in the registry, new or not."""
        one = self.watched.get(beat.replica)
        if one is None or beat.pid != one.pid or beat == one.heard:
            return None
        one.heard, one.silent_s = beat, 0.0
        one.peak = max(one.peak, beat.progress)
        if one.phase != "starting" or beat.state in START_STATES:
            return None
        one.phase, one.up_since = "working", now
        if one.died is None:
            return None
        down, one.died = now - one.died, None
        return Back(beat.replica, beat.pid, down)

    def looked(self, now: float) -> list[Hung]:
        """The registry was read, and all of it went through `heard`: whose process lives in silence?"""
        before = self._awake.seconds
        passed = self._awake.look(now) - before
        hung = []
        for replica, one in self.watched.items():
            if one.phase not in ("starting", "working") or one.accused or not one.pid:
                continue
            one.silent_s += passed
            limit = self.rules.start_s if one.heard is None else self.rules.silent_s
            if one.silent_s > limit * 2 ** min(one.hangs, 6):
                one.hangs += 1
                state = "never showed a heartbeat" if one.heard is None else f"last state {one.heard.state!r}"
                one.accused = f"hung: its process lived without a heartbeat for {one.silent_s:.0f} s, {state}"
                hung.append(Hung(replica, one.accused))
        return hung

    def blind(self) -> None:
        """The registry cannot be read: time until the next look accuses nobody, and silence counts from there."""
        self._awake.close_eyes()
        for one in self.watched.values():
            one.silent_s = 0.0

    def due(self, now: float) -> list[str]:
        """Replicas to start now."""
        return [replica for replica, one in self.watched.items() if one.phase == "dead" and now >= one.due]

    def next_due(self) -> float | None:
        """When the next restart is due; None while nobody is dead."""
        return min((one.due for one in self.watched.values() if one.phase == "dead"), default=None)

    def waits_for(self) -> list[str]:
        """Replicas that died and are not back yet."""
        return sorted(replica for replica, one in self.watched.items() if one.died is not None and one.phase != "left")

    def _again(self, one: Watched, now: float, cause: str, longest_s: float, say: str) -> Restart:
        delay = self.rules.first_s
        if one.deaths > 1:
            delay = min(longest_s, self.rules.back_off_s * 2.0 ** min(one.deaths - 2, 30))
        one.due = now + delay
        return Restart(delay, cause, one.deaths, say)

    def _fails(self, one: Watched, steady: bool) -> bool:
        """Count a failure; True when there were too many."""
        further = one.peak > one.reached if one.service in KEEPS_PROGRESS else steady
        one.failures = 1 if further else one.failures + 1
        one.reached = one.peak
        return one.failures >= self.rules.failures

    def _leaving(self, replica: str, service: str) -> str:
        others = [name for name, one in self.watched.items() if one.service == service and one.phase != "left"]
        rest = "" if others else f"; that was the last {service}, and the run waits for another one"
        return f"{replica} was asked to stop and left{rest}"

    def _once(self, one: Watched, topic: str, news: str) -> str:
        """The news, or '' if there was some of this topic already."""
        if topic in one.told:
            return ""
        one.told.add(topic)
        return news
