"""Credits: which prompt group may be issued now, and from which weights on it may be sampled. A pure state machine.

P = groups per step, S = max_staleness, W = the trainer's window, k = updates done, t = groups trained.

- A group's **seat** is what goes before it into training as far as is known at its issue: trained + in flight.
- The trainer takes groups in the order of issue and lets at most W - 1 later ones pass, so the group is in update
  floor((seat + W - 1) / P) at the latest. `min_step` is that minus S: no token of the group can be older than S.
- At most (S + 1) P - (W - 1) groups are in flight. Then seat <= t + slots - 1 <= t + (S + 1) P - W, hence
  min_step <= floor(t / P) = k: **whatever is issued may be sampled under the newest weights**, so nobody ever waits for an
  update that waits for him. With (S + 1) P slots and W >= 2 a group could need step k + 1, and drops of its predecessors
  would leave update k without a full batch for ever.
- A group is issued only while trained + in flight < steps * P, so that at the end nothing is in flight.
- A dropped group's successor takes the next issue number. Prompts dropped for `stale` or `rollback`, which say nothing about the
  prompt, are issued again as `<id>.1`, `<id>.2`, and so on up to MAX_ATTEMPTS times.

- A rollback to step R voids what groups of the lost history were promised: `shared.waivers` keeps them from waiting for ever.
- A deterministic run issues in rounds instead (`shared.rounds`), so that no ticket depends on when a drop became known.

All state is the fold of the receipts stream (`shared.ledger`), so a restarted controller has the same credits.
`tests/controller/test_credits.py` model-checks no deadlock, the bound, conservation and the slots, with drops, rollbacks and a
controller that dies between any two messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared import rounds
from shared.config import RunConfig
from shared.ledger import Ledger
from shared.records import Receipt
from shared.waivers import Waivers

REISSUED = ("stale", "rollback")
"""Drop reasons after which the prompt gets another group."""

MAX_ATTEMPTS = 3
"""Further groups that one prompt may get: a prompt that keeps going stale must not take credits for ever."""

HOPELESS_ROUNDS = 20
"""So many times the slots dropped in a row, with not one survivor between, and the run is given up."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The run's numbers, and the two formulas."""

    steps: int
    groups_per_step: int
    max_staleness: int = 0
    window: int = 1
    deterministic: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> Rules:
        return cls(config.steps, config.groups_per_step, config.max_staleness, config.window, config.deterministic)

    @property
    def slots(self) -> int:
        """Groups that may be in flight at once."""
        return (self.max_staleness + 1) * self.groups_per_step - (self.window - 1)

    @property
    def total(self) -> int:
        """Groups that the run trains."""
        return self.steps * self.groups_per_step

    def last_update(self, seat: int) -> int:
        """The update, 0-based, in which the group on this seat is trained at the latest."""
        return (seat + self.window - 1) // self.groups_per_step

    def min_step(self, seat: int) -> int:
        """Weights older than this many updates may not draw a token of the group on this seat."""
        return max(0, self.last_update(seat) - self.max_staleness)

    def round_end(self, step: int, head: int) -> int:
        """See shared.rounds.end."""
        return rounds.end(
            steps=self.steps, groups_per_step=self.groups_per_step, slots=self.slots, step=step, head=head
        )


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to issue one group."""

    group_id: str
    position: int
    """Of the prompt in the data order, counted on over epochs."""
    issue: int
    seat: int
    min_step: int


@dataclass(slots=True)
class Credits:
    """Fold receipts with `apply`; `plan` says what may be issued now."""

    rules: Rules
    epoch_size: int | None = None
    """Prompts in an epoch; None: the source never ends and everything is epoch 0."""
    ledger: Ledger = field(default_factory=Ledger)
    fresh: int = 0
    """Prompts issued for the first time so far: the cursor in the data order."""
    again: deque[str] = field(default_factory=deque)
    """Ids to be issued next, of prompts whose last group was dropped for no fault of theirs."""
    waivers: Waivers = field(default_factory=Waivers)
    """To be written to KV whenever `apply` of a rollback changed it."""
    drops_since_trained: int = 0

    @property
    def step(self) -> int:
        """Updates done."""
        return self.ledger.trained // self.rules.groups_per_step

    @property
    def in_flight(self) -> int:
        return self.ledger.pending

    @property
    def done(self) -> bool:
        """Every update of the run has its full batch."""
        return self.ledger.trained >= self.rules.total

    @property
    def free(self) -> int:
        """Groups that may be issued now."""
        if self.rules.deterministic:
            return self._due()
        seats_left = self.rules.total - self.ledger.trained - self.in_flight
        return max(0, min(self.rules.slots - self.in_flight, seats_left))

    @property
    def head(self) -> int:
        """The issue number behind the last group of the last complete update. Only `window` 1 makes it a border."""
        last = self.ledger.by_step[self.step - 1] if self.step else []
        return max((self.ledger.entries[group_id].issue for group_id in last), default=-1) + 1

    def apply(self, receipt: Receipt) -> bool:
        """Fold one receipt. True if it changed the ledger. Evaluation groups have no credit: their receipts change nothing."""
        if receipt.kind == "rollback" and not receipt.detail.get("repeats") and not self.ledger.is_fenced(receipt):
            self.waivers.add(self.ledger.next_issue, receipt.step)
        if not self.ledger.apply(receipt):
            return False
        if receipt.kind == "issued":
            self._count_issued(receipt.group_id)
        elif receipt.kind == "dropped":
            self.drops_since_trained += 1
        elif receipt.kind == "trained":
            self.drops_since_trained = 0
        for group_id in (receipt.group_id, *receipt.detail.get("lost", ())):
            entry = self.ledger.entries.get(group_id)
            if entry is not None and entry.issued and entry.fate == "dropped" and entry.reason in REISSUED:
                self._queue_again(group_id)
        return True

    def restored(self, stored: Waivers) -> None:
        """The whole log is folded again after a restart, and `stored` is what KV held.

        A group that was planned before a rollback may have been issued after it, so the place of the rollback in the log is no
        measure: what KV has not yet stands for everything issued until now.
        """
        known = len(stored.issues)
        self.waivers.issues[:known] = stored.issues
        self.waivers.issues[known:] = [self.ledger.next_issue] * (len(self.waivers.issues) - known)
        self.drops_since_trained = 0

    def plan(self) -> list[Ticket]:
        """What may be issued now, in order. Nothing is taken until the `issued` receipts are applied."""
        return list(self._tickets())

    def hopeless(self) -> int:
        """How many groups in a row were dropped if that is beyond all hope, else 0: the batch would never fill."""
        limit = HOPELESS_ROUNDS * self.rules.slots
        if self.drops_since_trained < limit:
            return 0
        longest = run = 0
        for entry in sorted(self.ledger.entries.values(), key=lambda entry: entry.issue):
            run = run + 1 if entry.fate == "dropped" else 0
            longest = max(longest, run)
        return longest if longest >= limit else 0

    def _tickets(self) -> Iterator[Ticket]:
        seat, issue = self.ledger.trained + self.in_flight, self.ledger.next_issue
        again, fresh = list(self.again), self.fresh
        head = self.head if self.rules.deterministic else 0
        for number in range(self.free):
            if again:
                group_id = again.pop(0)
                position = self.position_of(group_id)
            else:
                group_id, position = self.group_id(fresh), fresh
                fresh += 1
            here = seat + number
            if self.rules.deterministic:  # drops since `head` are not counted, whether they are known or not
                behind = min(issue + number - head, self.rules.slots - 1)
                here = self.step * self.rules.groups_per_step + behind
            min_step = self.step if self.rules.deterministic else self.rules.min_step(here)
            yield Ticket(group_id, position, issue + number, here, min_step)

    def _due(self) -> int:
        """What is left of the round, or what the update lacks for certain."""
        if self.done:
            return 0
        left_in_round = self.rules.round_end(self.step, self.head) - self.ledger.next_issue
        for_this_update = self.in_flight + self.ledger.trained - self.step * self.rules.groups_per_step
        return max(0, left_in_round, self.rules.groups_per_step - for_this_update)

    def group_id(self, position: int) -> str:
        epoch, index = divmod(position, self.epoch_size) if self.epoch_size else (0, position)
        return f"{epoch}-{index}"

    def position_of(self, group_id: str) -> int:
        """Of the group's prompt in the data order, counted on over epochs."""
        epoch, index = split_id(group_id)[0].split("-")
        return int(epoch) * (self.epoch_size or 0) + int(index)

    def _count_issued(self, group_id: str) -> None:
        _, attempt = split_id(group_id)
        if attempt == 0:
            self.fresh += 1
        elif group_id in self.again:
            self.again.remove(group_id)

    def _queue_again(self, group_id: str) -> None:
        base, attempt = split_id(group_id)
        following = f"{base}.{attempt + 1}"
        if attempt < MAX_ATTEMPTS and following not in self.ledger.entries and following not in self.again:
            self.again.append(following)


def split_id(group_id: str) -> tuple[str, int]:
    """`3-17.2` is the prompt `3-17` and attempt 2; the first attempt has no suffix."""
    base, _, attempt = group_id.partition(".")
    return base, int(attempt or 0)
