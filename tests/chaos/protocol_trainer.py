"""The trainer of the protocol's model: one process from its start to its end, one effect at a time (protocol.py has the rest)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from services.controller.credits import Ticket
from services.trainer.window import Window
from shared.ledger import Ledger
from shared.records import Receipt

if TYPE_CHECKING:
    from tests.chaos.protocol import Protocol


class Fenced(Exception):
    """A process is told that another has taken its place; it ends."""


@dataclass(frozen=True)
class Copy:
    """One group with samples. `number` tells two drawings of the same group apart."""

    ticket: Ticket
    version: int
    number: int


@dataclass(frozen=True)
class Saved:
    """A checkpoint. `weights`: what went into each update, which is what the weights are."""

    sequence: int
    weights: tuple[tuple[Copy, ...], ...]
    window: dict[str, Any]
    rollbacks: tuple[tuple[int, int], ...]
    untold: tuple[Receipt, ...]


class Trainer:
    """One process, from its start to its end."""

    def __init__(self, world: Protocol) -> None:
        self.world, self.rules = world, world.rules
        self.done = self.ended = False
        self.weights: list[tuple[Copy, ...]] = []
        self.window: Window[int] = Window(self.rules.window)
        self.rollbacks: list[tuple[int, int]] = []
        self.ledger, self.folded = Ledger(), 0
        self.held: dict[str, int] = {}
        self.batch: list[Copy] = []
        self.uncovered: list[str] = []
        self.ages: list[int] = []
        self.life = self._live()

    @property
    def step(self) -> int:
        return len(self.weights)

    def act(self) -> bool:
        """One effect. False if there was nothing to do."""
        if self.done or self.ended:
            return False
        try:
            return next(self.life)
        except Fenced:
            self.ended = True
            if self is self.world.trainer:
                self.world.kill_trainer()  # its launcher starts it again
            return True
        except StopIteration:
            self.done = self.ended = True
            return True

    def _live(self) -> Iterator[bool]:
        world = self.world
        world.claims += 1
        self.epoch = world.claims
        yield True
        yield from self._begin()
        while self.step < self.rules.steps:
            yield from self._fill_batch()
            self.weights.append(tuple(self.batch))
            self.uncovered += [copy.ticket.group_id for copy in self.batch]
            receipts, window = self._receipts(), self.window.state()
            self.batch = []
            last = self.step == self.rules.steps and world.last_first
            if last:
                yield self._save(window, receipts)
            for receipt in receipts:
                world.publish(receipt, f"trained:{receipt.group_id}:{self.epoch}")
                yield True
            yield self._publish_weights()
            if self.step % world.every == 0 or self.step == self.rules.steps:
                if not last:
                    yield self._save(window, [])
                for group_id in self.uncovered:
                    yield self._ack(self.held.pop(group_id))
                self.uncovered = []

    def _begin(self) -> Iterator[bool]:
        """From the newest checkpoint, or the first time."""
        world = self.world
        if not world.saved:
            yield self._save(self.window.state(), [])
            yield self._publish_weights()
            yield self._take_over()
            return
        saved = world.saved[-1]
        damaged = [one for one in world.aside if one.sequence > saved.sequence]
        self.weights, self.rollbacks = list(saved.weights), list(saved.rollbacks)
        self.window = Window.restore(saved.window)
        yield True
        yield self._publish_weights()
        yield self._take_over()
        self._fold()
        yield from self._roll_back(saved, damaged)

    def _take_over(self) -> bool:
        """Before the rollback is written: else a zombie could acknowledge a group whose drop does not count any more."""
        self.world.work["advantages"].release()
        self.world.consumer = self
        return True

    def _roll_back(self, saved: Saved, damaged: list[Saved]) -> Iterator[bool]:
        sequence = max((one.sequence for one in damaged), default=0)
        lost = []
        if sequence > self.ledger.damaged:
            to = max(len(one.weights) for one in damaged)
            lost = [group_id for step in range(self.step, to) for group_id in self.ledger.by_step.get(step, [])]
        yield True
        detail = {"epoch": self.epoch, "version": self.version, "lost": lost, "damaged": sequence}
        self.world.publish(Receipt("rollback", step=self.step, detail=detail), f"rollback:{self.version}")
        self.rollbacks.append((self.version, self.step))
        for group_id in lost:
            self.window.drop(self.ledger.entries[group_id].issue)
        yield True
        for receipt in saved.untold:
            told = replace(receipt, detail={"epoch": self.epoch})
            self.world.publish(told, f"trained:{receipt.group_id}:{self.epoch}")
            yield True

    def _fill_batch(self) -> Iterator[bool]:
        while len(self.batch) < self.rules.groups_per_step:
            news = self._fold()
            taken = self.window.take(1)
            if not taken:
                yield self._receive() or news
                continue
            copy = self.world.work["advantages"].messages[taken[0][1]]
            age = self.step - self._counted_step(copy)
            if age <= self.rules.max_staleness:
                self.ages.append(age)
                self.batch.append(copy)
                yield True
                continue
            at = copy.ticket
            receipt = Receipt("dropped", at.group_id, at.issue, at.seat, at.min_step, reason="stale")
            self.world.publish(replace(receipt, detail={"epoch": self.epoch}), f"dropped:{at.group_id}:{self.epoch}")
            yield True

    def _fold(self) -> bool:
        news = self.folded < len(self.world.log)
        for receipt in self.world.log[self.folded :]:
            changed = self.ledger.apply(receipt)
            if self.ledger.epoch > self.epoch:
                raise Fenced
            if changed:
                for group_id in (receipt.group_id, *receipt.detail.get("lost", ())):
                    entry = self.ledger.entries.get(group_id)
                    if entry is not None and entry.issued and entry.fate == "dropped":
                        self.window.drop(entry.issue)
                        if group_id in self.held:
                            self._ack(self.held.pop(group_id))
        self.folded = len(self.world.log)
        return news

    def _receive(self) -> bool:
        if self.world.consumer is not self:
            raise Fenced
        seq = self.world.work["advantages"].pull(self)
        if seq is None:
            return False
        at = self.world.work["advantages"].messages[seq].ticket
        if self.ledger.fate(at.group_id) == "dropped" or not self.window.offer(at.issue, seq):
            return self._ack(seq)
        self.held[at.group_id] = seq
        return True

    def _receipts(self) -> list[Receipt]:
        tickets = [copy.ticket for copy in self.weights[-1]]
        detail = {"epoch": self.epoch}
        return [
            Receipt("trained", at.group_id, at.issue, at.seat, at.min_step, step=self.step - 1, detail=detail)
            for at in tickets
        ]

    def _ack(self, seq: int) -> bool:
        if self.world.consumer is not self:
            raise Fenced
        self.world.work["advantages"].ack(seq)
        return True

    def _save(self, window: dict[str, Any], untold: list[Receipt]) -> bool:
        if self.world.claims != self.epoch:
            raise Fenced
        self.world.sequence += 1
        saved = Saved(self.world.sequence, tuple(self.weights), window, tuple(self.rollbacks), tuple(untold))
        self.world.saved = [*self.world.saved, saved][-2:]
        return True

    def _publish_weights(self) -> bool:
        world = self.world
        if self in world.retired:
            raise Fenced
        if world.publisher not in (None, self):
            world.retired.append(world.publisher)  # type: ignore[arg-type]
        world.publisher = self
        world.versions.append(self.step)
        self.version = len(world.versions) - 1
        return True

    def _counted_step(self, copy: Copy) -> int:
        undone = [back_to for version, back_to in self.rollbacks if copy.version < version]
        return min([self.world.versions[copy.version], *undone])
