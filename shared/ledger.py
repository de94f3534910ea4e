"""The fate of every group, folded from the receipts stream: `issued = trained + dropped(by reason) + pending`.

A pure state machine. The controller frees credits by it, the trainer skips dropped seats by it, and `slipstream audit` proves
conservation by it, so there is one reading of the log and not three. Rules, held by `tests/shared/test_ledger.py`:

- `issued` opens a group once; a repeated receipt (an ack that a killed broker forgot) changes nothing.
- The first fate wins: `trained` after `dropped`, or the reverse, is counted in `conflicts` and changes nothing.
- `rollback(step=k)` reopens whatever was trained in an update >= k: those updates no longer exist in any weights. Groups that it
  names as `lost` (their samples are gone for good) are dropped with reason `rollback` in the same breath.
- It also fences: trainers number themselves (their epoch), and what a replaced one, stopped and woken again, writes after the
  rollback of a later one does not count.
- A fate may arrive before its `issued` (two writers, one log): it is kept and counts once the group is issued.
- Evaluation groups have no fate: whatever is written about one changes nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shared.records import Receipt

REPORTS = ("dropped", "evaluated")
"""Receipts that any service may write which works on a group; the others are decisions of the controller and the trainer."""


@dataclass(slots=True)
class Entry:
    """One group's line in the ledger."""

    group_id: str
    issue: int = -1
    seat: int = -1
    min_step: int = 0
    fate: str = "pending"
    """pending | trained | dropped"""
    step: int = -1
    """The update it was trained in, 0-based."""
    reason: str = ""
    issued: bool = False


@dataclass(slots=True)
class Ledger:
    """Fold receipts with `apply`; read the counts."""

    entries: dict[str, Entry] = field(default_factory=dict)
    by_step: dict[int, list[str]] = field(default_factory=dict)
    issued: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    conflicts: list[Receipt] = field(default_factory=list)
    rollbacks: int = 0
    epoch: int = 0
    """Of the last trainer that went on from a checkpoint."""
    fenced: int = 0
    """Receipts of replaced trainers, which did not count."""
    damaged: int = 0
    """The last damaged checkpoint whose lost groups were dropped, by its sequence number."""

    @property
    def pending(self) -> int:
        return self.issued - self.trained - self.dropped.total()

    @property
    def next_issue(self) -> int:
        return self.issued

    @property
    def balanced(self) -> bool:
        """Recounts every entry, so that a slip in the running totals cannot hide."""
        known = [entry for entry in self.entries.values() if entry.issued]
        fates = Counter(entry.fate for entry in known)
        return (
            len(known) == len(self.entries) == self.issued
            and fates["trained"] == self.trained
            and fates["dropped"] == self.dropped.total()
            and fates["pending"] == self.pending >= 0
            and not self.conflicts
        )

    def fate(self, group_id: str) -> str:
        """trained | dropped | pending, or '' for a group that the ledger does not know."""
        entry = self.entries.get(group_id)
        return entry.fate if entry else ""

    def pending_entries(self) -> list[Entry]:
        """In the order of issue."""
        return sorted((e for e in self.entries.values() if e.issued and e.fate == "pending"), key=lambda e: e.issue)

    def apply(self, receipt: Receipt) -> bool:
        """Fold one receipt. True if it changed the ledger."""
        if receipt.kind == "evaluated" or is_eval(receipt.group_id):
            return False
        if self.is_fenced(receipt):
            self.fenced += 1
            return False
        if receipt.kind == "rollback":
            return self._roll_back(receipt)
        entry = self.entries.setdefault(receipt.group_id, Entry(receipt.group_id))
        if receipt.kind == "issued":
            return self._open(entry, receipt)
        return self._settle(entry, receipt)

    def is_fenced(self, receipt: Receipt) -> bool:
        """Whether it comes from a trainer that another has replaced in the log by now."""
        return bool(receipt.detail.get("epoch", self.epoch) < self.epoch)

    def _open(self, entry: Entry, receipt: Receipt) -> bool:
        if entry.issued:
            return False
        entry.issued, entry.issue, entry.seat, entry.min_step = True, receipt.issue, receipt.seat, receipt.min_step
        self.issued += 1
        self._count(entry, 1)
        return True

    def _settle(self, entry: Entry, receipt: Receipt) -> bool:
        if entry.fate != "pending":
            same = entry.fate == receipt.kind and (receipt.kind == "dropped" or entry.step == receipt.step)
            if not same:
                self.conflicts.append(receipt)
            return False
        entry.fate, entry.step, entry.reason = receipt.kind, receipt.step, receipt.reason
        if receipt.kind == "trained":
            self.by_step.setdefault(receipt.step, []).append(entry.group_id)
        self._count(entry, 1)
        return True

    def _roll_back(self, receipt: Receipt) -> bool:
        self.rollbacks += 1
        self.epoch = max(self.epoch, receipt.detail.get("epoch", 0))
        self.damaged = max(self.damaged, receipt.detail.get("damaged", 0))
        undone = [step for step in self.by_step if step >= receipt.step]
        for step in undone:
            for group_id in self.by_step.pop(step):
                entry = self.entries[group_id]
                self._count(entry, -1)
                entry.fate, entry.step = "pending", -1
        for lost in map(self.entries.get, receipt.detail.get("lost", ())):
            if lost is not None and lost.fate == "pending":
                lost.fate, lost.reason = "dropped", "rollback"
                self._count(lost, 1)
        return bool(undone)

    def _count(self, entry: Entry, change: int) -> None:
        if not entry.issued:
            return
        if entry.fate == "trained":
            self.trained += change
        elif entry.fate == "dropped":
            self.dropped[entry.reason] += change


def is_eval(group_id: str) -> bool:
    """Whether the id is one of an evaluation group, `eval-<step>-<index>`."""
    return group_id.startswith("eval-")
