"""Whose turn it is on a device that trainer and engines share (`placement: colocate`). A pure state machine.

    engines' turn --ask--> the trainer waits --(every engine sleeps)--> trainer's turn --give(version)--> engines' turn

Guarantees, held by the property tests in tests/shared/test_turns.py:
- The trainer's turn begins only when no engine is awake; an engine wakes only in the engines' turn. So they never meet.
- Nobody waits for the dead: a replica that lost its engine, was restarted, or whose heartbeat is gone is taken off the table by
  whoever sees it; a trainer that starts anew asks, whatever the one before was at. What that one does afterwards is refused.
- Every step may be repeated, and asking goes before waking: engines that keep coming cannot keep the trainer waiting.

The table is one key of the run's config bucket, changed by compare-and-set only (shared/turn_table.py), so there is one order of
all steps, and whoever is killed anywhere leaves a table from which the others and his successor can go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from shared.wire import decode, encode, schema

KEY = "turns"
"""Where the table lies in the run's config bucket."""


class Replaced(RuntimeError):
    """Another trainer has asked for the device since; this one must stop."""


class NotYours(RuntimeError):
    """The device cannot be given by who does not have it."""


@dataclass(frozen=True, slots=True)
class Seat:
    """An engine's place at the table."""

    replica: str
    incarnation: str
    """Of the engine: a new one with every start."""
    awake: bool
    version: int = 0
    """The weights that it took last."""
    since: float = field(default=0.0, compare=False)
    """When it sat down."""


@schema("turns", 1)
@dataclass(slots=True)
class Turns:
    """The table. Until a trainer has given the device for the first time it is the trainer's: the first weights are its work."""

    holder: Literal["trainer", "engines"] = "trainer"
    number: int = 0
    """The trainer's turns so far, this one included."""
    trainer: str = ""
    """Incarnation of the trainer that asked last."""
    host: str = ""
    """Where the device is."""
    version: int = 0
    """The weights that engines take when they wake."""
    seats: list[Seat] = field(default_factory=list)
    """By replica."""

    def dump(self) -> bytes:
        return encode(self)

    @classmethod
    def load(cls, data: bytes) -> Turns:
        return decode(data, cls)

    # -- the trainer --------------------------------------------------------------------------------------------------

    def ask(self, trainer: str, host: str) -> None:
        """From here on no engine wakes. The device is the trainer's once `alone`."""
        if (self.holder, self.trainer) == ("trainer", trainer):
            return
        self.holder, self.trainer, self.host = "trainer", trainer, host
        self.number += 1

    def alone(self, trainer: str) -> bool:
        """Whether this trainer has the device. Raises Replaced."""
        self._refuse_replaced(trainer)
        return self.holder == "trainer" and not self.awake()

    def give(self, trainer: str, version: int) -> None:
        """The trainer sleeps: engines may wake, on these weights. Raises Replaced, or NotYours before the turn has begun."""
        self._refuse_replaced(trainer)
        if self.holder == "engines":
            return
        if self.awake():
            raise NotYours(f"{', '.join(self.awake())} did not sleep yet, so the device is not the trainer's to give")
        self.holder, self.version = "engines", version

    def taken(self, version: int) -> bool:
        """Every engine at the table has taken these weights, or newer ones."""
        return self.holder == "engines" and all(seat.version >= version for seat in self.seats)

    # -- the engines --------------------------------------------------------------------------------------------------

    def awake(self) -> list[str]:
        """Replicas whose engines hold the device's memory, or are about to."""
        return [seat.replica for seat in self.seats if seat.awake]

    def enter(self, replica: str, incarnation: str, now: float) -> bool:
        """This engine is about to start, or to wake. False: it is the trainer's turn."""
        if self.holder != "engines":
            return False
        seat = self.seat(replica)
        known = seat.version if seat is not None and seat.incarnation == incarnation else 0
        self._put(Seat(replica, incarnation, True, known, now))
        return True

    def sleep(self, replica: str, incarnation: str) -> None:
        """This engine has given its memory back."""
        self._own(replica, incarnation, awake=False)

    def took(self, replica: str, incarnation: str, version: int) -> None:
        """This engine serves these weights."""
        self._own(replica, incarnation, version=version)

    def leave(self, replica: str, incarnation: str = "") -> None:
        """This engine is no more; without `incarnation`: whatever engine an earlier process of the replica had."""
        seat = self.seat(replica)
        if seat is not None and incarnation in ("", seat.incarnation):
            self.put_out([replica])

    # -- anyone -------------------------------------------------------------------------------------------------------

    def missing(self, living: Iterable[str], now: float, grace_s: float) -> list[str]:
        """Replicas without a heartbeat that have been here for long enough to have shown one."""
        alive = set(living)
        return [
            seat.replica for seat in self.seats if seat.replica not in alive and not 0 <= now - seat.since < grace_s
        ]

    def put_out(self, replicas: Iterable[str]) -> None:
        gone = set(replicas)
        self.seats = [seat for seat in self.seats if seat.replica not in gone]

    def seat(self, replica: str) -> Seat | None:
        return next((seat for seat in self.seats if seat.replica == replica), None)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _refuse_replaced(self, trainer: str) -> None:
        if self.trainer != trainer:
            raise Replaced("another trainer has asked for the device since; this one must stop")

    def _own(self, replica: str, incarnation: str, awake: bool | None = None, version: int | None = None) -> None:
        """Change a seat, if it is still this engine's."""
        seat = self.seat(replica)
        if seat is None or seat.incarnation != incarnation:
            return
        awake = seat.awake if awake is None else awake
        self._put(replace(seat, awake=awake, version=seat.version if version is None else version))

    def _put(self, seat: Seat) -> None:
        others = [other for other in self.seats if other.replica != seat.replica]
        self.seats = sorted([*others, seat], key=lambda one: one.replica)
