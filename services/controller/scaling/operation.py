"""Scale operations as a state machine. Pure; tests/controller/test_scale_operation.py holds the table and the properties.

    out   PENDING -> CREATING (CONNECTING: engines elsewhere) -> HEALTH_CHECKING -> WEIGHT_SYNCING -> READY -> ACTIVE
          from any of these -> REMOVING -> FAILED | PARTIAL | CANCELLED
    in    PENDING -> DRAINING -> REMOVING -> COMPLETED | PARTIAL | FAILED;  from PENDING and DRAINING also -> CANCELLED
    both  PENDING -> NOOP, when the target is reached already

An operation stays PENDING while an earlier one that it conflicts with goes on; its target is looked at when it starts. It is as
far as the newcomer that is least far; READY says that all work under weights at least as new as the newest when it started,
ACTIVE that each has been heard of once more since. `advance` makes one step from what is seen; `wishes` says what an operation in
its state wants of the launchers, so that whoever takes over needs nothing but the records: repeating a wish does no harm.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from shared import wire
from shared.records import Heartbeat
from shared.wanted import Wanted

UP = ("CREATING", "CONNECTING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "READY")
"""States of an operation whose newcomers come up, from the least to the most advanced."""
TERMINAL = frozenset({"ACTIVE", "COMPLETED", "PARTIAL", "FAILED", "CANCELLED", "NOOP"})
STATES = frozenset({"PENDING", *UP, "DRAINING", "REMOVING", *TERMINAL})
HEALTH = frozenset({"", "starting", "starting engine", "loading model", "waiting for engine"})
WEIGHTS = frozenset({"fetching weights", "waiting for weights"})
REMOVE_S = 30.0
"""What a replica may take to go when it is ended, its heartbeat's time to live included."""
HOLDS_WEIGHTS = "rollout"
"""The service whose replicas follow the policy's weights."""


@wire.schema("scale_operation", 1)
@dataclass(slots=True)
class Operation:
    """One durable record."""

    id: str
    kind: Literal["out", "in"]
    role: str
    request: str
    """What was asked for, to tell a repetition from another request under the same key."""
    number: int
    """Order of arrival."""
    created: float
    timeout_s: float
    drain_s: float = 40.0
    """What newcomers that are taken back may take to finish what they hold."""
    target: int | None = None
    """Replicas that there shall be, engines elsewhere not counted."""
    urls: list[str] = field(default_factory=list)
    """Engines elsewhere."""
    names: list[str] = field(default_factory=list)
    """Replicas that shall leave."""
    force: bool = False
    keep_partial: bool = True
    status: str = "PENDING"
    outcome: str = ""
    """What REMOVING leads to, or 'CANCELLED' while a drain is being taken back."""
    began: float = 0.0
    """When it left PENDING."""
    removing_since: float = 0.0
    updated: float = 0.0
    version: int = -1
    """The newest weights when it began."""
    specs: dict[str, dict[str, str]] = field(default_factory=dict)
    """Members, as they stand in `Wanted.replicas`; {} for one that no launcher started."""
    removing: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    """By member."""
    ready_beats: dict[str, float] = field(default_factory=dict)
    """The heartbeat that showed each newcomer READY."""
    message: str = ""
    reached: dict[str, float] = field(default_factory=dict)
    """Seconds from the request to each state."""
    first_trained: dict[str, float] = field(default_factory=dict)
    """Seconds from the request to the first group of each newcomer that was trained on."""

    @property
    def over(self) -> bool:
        return self.status in TERMINAL

    @property
    def staying(self) -> list[str]:
        """Members that are not to go."""
        return [name for name in self.specs if name not in self.removing]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the world looks like."""

    beats: dict[str, Heartbeat]
    wanted: Wanted
    gone: dict[str, str] = field(default_factory=dict)
    """Replicas that their launcher will not start again, and why."""
    version: int = -1
    """The newest weights."""

    def there(self, name: str) -> bool:
        """Heard of, or wanted: a launcher may be starting it."""
        return name in self.beats or name in self.wanted.replicas

    def natives(self, role: str) -> list[str]:
        """Replicas of a role with an engine of their own that are there or on their way, the newest last."""
        wanted = {name for name in self.wanted.of(role) if not self.wanted.replicas[name].get("engine_url")}
        elsewhere = {name for name, one in self.wanted.replicas.items() if one.get("engine_url")}
        alive = {name for name, beat in self.beats.items() if beat.service == role} - elsewhere
        names = (wanted | alive) - set(self.wanted.leaving) - set(self.wanted.killed)
        return sorted(names - self.gone.keys(), key=self._age)

    def _age(self, name: str) -> tuple[float, int, str]:
        beat = self.beats.get(name)
        return (beat.started if beat else float("inf"), *natural(name))


@dataclass(frozen=True, slots=True)
class Wishes:
    """What an operation wants of launchers and replicas, for as long as it is in its state."""

    want: dict[str, dict[str, str]] = field(default_factory=dict)
    leave: frozenset[str] = frozenset()
    kill: frozenset[str] = frozenset()


def conflict(one: Operation, other: Operation) -> bool:
    """Whether the two must not go on at once."""
    if one.role != other.role:
        return False
    mine, theirs = claims(one), claims(other)
    counts = {"count"} & (mine | theirs)
    names = any(claim.startswith("name ") for claim in mine | theirs)
    return bool(mine & theirs) or (bool(counts) and names)


def claims(one: Operation) -> set[str]:
    """What it has for itself: the number of a role's replicas, single replicas, or engines elsewhere."""
    if one.urls:
        return {f"url {url}" for url in one.urls}
    return {f"name {name}" for name in one.names} if one.names else {"count"}


def advance(one: Operation, seen: Seen, others: Iterable[Operation], now: float) -> Operation:
    """One step beside `others`, or the same operation if there is none to make."""
    if one.over:
        return one
    if one.status == "PENDING":
        going = [other for other in others if not other.over and other.id != one.id]
        if any(other.number < one.number and conflict(one, other) for other in going):
            return one
        names = {name for other in going for name in other.specs}
        return _to(_begin_in(one, seen, now) if one.kind == "in" else _begin_out(one, seen, names, now), now)
    step = _removing if one.status == "REMOVING" else (_coming if one.kind == "out" else _draining)
    after = step(one, seen, now)
    return one if after == one else _to(after, now)


def cancel(one: Operation, now: float) -> Operation:
    """Take it back. Raises ValueError, saying why it cannot be."""
    if one.outcome == "CANCELLED" or one.status == "CANCELLED":
        return one
    if one.status in TERMINAL or one.status == "REMOVING":
        what = "is over" if one.over else "is ending replicas already"
        raise ValueError(f"an operation that is {one.status} cannot be cancelled: it {what}")
    if one.status == "PENDING":
        return _to(replace(one, status="CANCELLED", message="cancelled before it began"), now)
    if one.kind == "in":
        return _to(replace(one, outcome="CANCELLED"), now)
    return _to(_undo(one, one.specs, "CANCELLED", "cancelled", now), now)


def wishes(one: Operation) -> Wishes:
    """See `Wishes`."""
    going = frozenset(one.removing)
    ended = going if one.removing_since else frozenset[str]()
    if one.kind == "out":
        if one.status in UP or one.status == "REMOVING":
            return Wishes({name: one.specs[name] for name in one.staying}, going, ended)
        return Wishes()
    if one.status == "DRAINING" and one.outcome == "CANCELLED":
        return Wishes({name: spec for name, spec in one.specs.items() if spec})
    if one.status in ("DRAINING", "REMOVING"):
        return Wishes({}, going, ended)
    return Wishes()


def merge(record: Wanted, operations: Iterable[Operation], gone: Iterable[str] = ()) -> Wanted:
    """The record as the operations that go on want it. Replicas that left for good, and that no operation asks for, are
    forgotten."""
    replicas, leave, kill, members = dict(record.replicas), set[str](), set[str](), set[str]()
    for one in operations:
        if one.over or one.status == "PENDING":
            continue
        wish = wishes(one)
        members |= one.specs.keys()
        replicas |= {name: spec for name, spec in wish.want.items() if name not in replicas}
        leave |= wish.leave
        kill |= wish.kill
    dropped = leave | kill | (set(gone) - members)
    kept = {name: spec for name, spec in replicas.items() if name not in dropped}
    return Wanted(kept, sorted(leave), sorted(kill), record.counts)


# ---- the steps


def _begin_out(one: Operation, seen: Seen, names_of_others: set[str], now: float) -> Operation:
    known = {spec.get("engine_url") for spec in seen.wanted.replicas.values()}
    new_urls = [url for url in one.urls if url not in known]
    count = len(new_urls) if one.urls else (one.target or 0) - len(seen.natives(one.role))
    if count <= 0:
        there = (
            "all of these engines are registered" if one.urls else f"there are {len(seen.natives(one.role))} already"
        )
        return replace(one, status="NOOP", message=there)
    taken = {
        *names_of_others,
        *seen.beats,
        *seen.wanted.replicas,
        *seen.wanted.leaving,
        *seen.wanted.killed,
        *seen.gone,
    }
    names = fresh(one.role, count, taken)
    urls = new_urls or [""] * count
    specs = {
        name: {"service": one.role, "by": one.id, "engine_url": url} for name, url in zip(names, urls, strict=True)
    }
    status = "CONNECTING" if one.urls else "CREATING"
    version = seen.version if one.role == HOLDS_WEIGHTS else -1
    return replace(one, status=status, specs=specs, began=now, version=version)


def _begin_in(one: Operation, seen: Seen, now: float) -> Operation:
    if one.urls:
        replicas = seen.wanted.replicas
        chosen = [name for name, spec in replicas.items() if spec.get("engine_url") in one.urls]
    elif one.names:
        there = {*seen.wanted.of(one.role), *(name for name, beat in seen.beats.items() if beat.service == one.role)}
        chosen = [name for name in one.names if name in there]
    else:
        chosen = leavers(seen, one.role, one.target or 0)
    if not chosen:
        return replace(one, status="NOOP", message="none of them is there, or no more than asked for")
    specs = {name: dict(seen.wanted.replicas.get(name, {})) for name in chosen}
    return replace(
        one,
        status="REMOVING" if one.force else "DRAINING",
        outcome="COMPLETED" if one.force else "",
        specs=specs,
        removing=list(chosen),
        began=now,
        removing_since=now if one.force else 0.0,
    )


def leavers(seen: Seen, role: str, target: int) -> list[str]:
    """Those that leave so that `target` stay: the newest first."""
    there = seen.natives(role)
    return there[target:][::-1] if target < len(there) else []


def _coming(one: Operation, seen: Seen, now: float) -> Operation:
    states = {name: _state(one, name, seen) for name in one.staying}
    failed = {name: why for name, why in seen.gone.items() if name in states}
    if now - one.began > one.timeout_s:
        late = {name: state for name, state in states.items() if state != "READY" and name not in failed}
        failed |= {
            name: f"not up within {one.timeout_s:g} s, {_why(one, name, state, seen)}" for name, state in late.items()
        }
    coming = {name: state for name, state in states.items() if name not in failed}
    if failed and all(state == "READY" for state in coming.values()):
        everything = not coming or not one.keep_partial
        outcome, why = ("FAILED" if everything else "PARTIAL"), "; ".join(f"{name}: {failed[name]}" for name in failed)
        undone = _undo(one, one.specs if everything else failed, outcome, why, now)
        return replace(undone, errors=one.errors | failed)
    status = min(coming.values() or ["CREATING"], key=UP.index)
    if status != "READY":
        return replace(one, status=status, ready_beats={})
    beats = {name: seen.beats[name].at for name in coming}
    if one.status != "READY" or one.ready_beats.keys() != beats.keys():
        return replace(one, status="READY", ready_beats=beats)
    again = all(beats[name] != at for name, at in one.ready_beats.items())
    return replace(one, status="ACTIVE") if again else one


def _state(one: Operation, name: str, seen: Seen) -> str:
    beat = seen.beats.get(name)
    if beat is None:
        return "CONNECTING" if one.urls else "CREATING"
    if beat.state in HEALTH:
        return "HEALTH_CHECKING"
    if beat.state in WEIGHTS or (one.role == HOLDS_WEIGHTS and beat.version < one.version):
        return "WEIGHT_SYNCING"
    return "READY"


def _why(one: Operation, name: str, state: str, seen: Seen) -> str:
    """What it was at when its time was up."""
    beat = seen.beats.get(name)
    if beat is None:
        return "and never heard of; is its launcher there, and has it room?"
    if state == "WEIGHT_SYNCING" and beat.version < one.version:
        return f"holds version {beat.version} of the weights, {one.version} is needed"
    return f"last state {beat.state!r}"


def _undo(one: Operation, names: Iterable[str], outcome: str, why: str, now: float) -> Operation:
    return replace(
        one, status="REMOVING", outcome=outcome, removing=list(names), message=why, removing_since=0.0, began=now
    )


def _draining(one: Operation, seen: Seen, now: float) -> Operation:
    left = [name for name in one.removing if not seen.there(name)]
    if one.outcome == "CANCELLED":
        if not {name for name, spec in one.specs.items() if spec} <= seen.wanted.replicas.keys():
            return one
        return replace(one, status="CANCELLED", removing=[], message="cancelled; who had left already is started again")
    if len(left) == len(one.removing):
        return replace(one, status="COMPLETED", removed=left)
    if now - one.began <= one.timeout_s:
        return replace(one, removed=left) if left != one.removed else one
    late = [name for name in one.removing if name not in left]
    why = f"did not drain within {one.timeout_s:g} s and ended: {', '.join(late)}"
    return replace(one, status="REMOVING", outcome="COMPLETED", removed=left, message=why, removing_since=now)


def _removing(one: Operation, seen: Seen, now: float) -> Operation:
    there = [name for name in one.removing if seen.there(name)]
    removed = [name for name in one.removing if name not in there]
    if not there:
        return replace(one, status=one.outcome, removed=removed)
    if not one.removing_since:  # newcomers that are taken back may hold work: they drain first
        return replace(one, removing_since=now) if now - one.began > one.drain_s else one
    if now - one.removing_since <= REMOVE_S:
        return one
    why = f"still there {REMOVE_S:g} s after it was to be ended; end its process where it runs"
    outcome = "FAILED" if one.kind == "out" or not removed else "PARTIAL"
    errors = one.errors | dict.fromkeys(there, why)
    return replace(one, status=outcome, removed=removed, errors=errors, message=f"{', '.join(there)}: {why}")


def _to(one: Operation, now: float) -> Operation:
    """Note when a state was first reached."""
    reached = one.reached if one.status in one.reached else {**one.reached, one.status: round(now - one.created, 3)}
    return replace(one, reached=reached, updated=now)


def fresh(role: str, count: int, taken: Iterable[str]) -> list[str]:
    """The first free names."""
    names, number, used = list[str](), 0, set(taken)
    while len(names) < count:
        if (name := f"{role}-{number}") not in used:
            names.append(name)
        number += 1
    return names


def natural(name: str) -> tuple[int, str]:
    """rollout-10 after rollout-9."""
    number = name.rpartition("-")[2]
    return (int(number) if number.isdigit() else 0, name)
