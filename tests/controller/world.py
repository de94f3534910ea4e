"""A whole run without I/O, message by message: the real credits and the real window, everybody else simulated.

Each method is one thing that one process can do; whoever drives decides who is next. `finish` lets everybody act fairly until the
run is over and fails if nobody can act any more: that would be a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from services.controller.credits import Credits, Rules, Ticket
from services.trainer.window import Window
from shared.records import Group, Receipt, Sampling
from shared.waivers import Waivers


@dataclass(slots=True)
class Sampled:
    """A ticket on its way. `version` indexes `World.versions`: the weights that drew its oldest token."""

    ticket: Ticket
    version: int = -1

    def group(self) -> Group:
        at = self.ticket
        return Group(at.group_id, "train", at.issue, at.seat, at.min_step, "", None, {}, Sampling(1, 1))


@dataclass(slots=True)
class Rollout:
    version: int = 0
    waiting: list[Sampled] = field(default_factory=list)
    running: list[Sampled] = field(default_factory=list)


@dataclass(slots=True)
class Checkpoint:
    step: int
    window: dict[str, Any]
    rollbacks: list[tuple[int, int]]
    next_issue: int = 0


class World:
    """One run. `waive=False` switches the waivers off."""

    def __init__(self, rules: Rules, replicas: int = 2, waive: bool = True) -> None:
        self.rules, self.waive = rules, waive
        self.log: list[Receipt] = []
        self.log_ids: set[str] = set()
        self.prompts: list[Ticket] = []
        self.prompt_ids: set[str] = set()
        self.cursor = 0
        self.stored_waivers = Waivers()
        self.versions = [0]
        self.rollouts = [Rollout() for _ in range(replicas)]
        self.scoring: list[Sampled] = []
        self.queue: dict[str, Sampled] = {}
        self.queued_ids: set[str] = set()
        self.ages: list[int] = []
        self.start_controller()
        self.start_trainer(Checkpoint(0, Window(rules.window).state(), []))

    def publish(self, receipt: Receipt, msg_id: str) -> None:
        if msg_id not in self.log_ids:
            self.log_ids.add(msg_id)
            self.log.append(receipt)

    # The controller

    def start_controller(self) -> None:
        """As after a SIGKILL: nothing but the log and KV is left."""
        self.credits, self.folded = Credits(self.rules, epoch_size=7), 0
        self.acting: Iterator[None] = iter(())
        self._fold_all()
        self.credits.restored(self.stored_waivers)
        self.acting = self._republish()

    def controller_acts(self) -> bool:
        """One message, or a look at the log when everything planned is out. False if there was nothing to do."""
        if next(self.acting, self) is None:
            return True
        news = self.folded < len(self.log)
        self._fold_all()
        plan = self.credits.plan()
        self.acting = self._issue(plan)
        return news or bool(plan)

    def _fold_all(self) -> None:
        for receipt in self.log[self.folded :]:
            self.credits.apply(receipt)
        self.folded = len(self.log)

    def _issue(self, plan: list[Ticket]) -> Iterator[None]:
        self.stored_waivers = Waivers(list(self.credits.waivers.issues), list(self.credits.waivers.steps))
        for ticket in plan:
            receipt = Receipt("issued", ticket.group_id, ticket.issue, ticket.seat, ticket.min_step)
            self.publish(receipt, f"issued:{ticket.group_id}")
            self.credits.apply(receipt)
            assert self.credits.in_flight <= self.rules.slots
            yield
        for ticket in plan:
            self._send_prompt(ticket)
            yield
        self.cursor = max(self.cursor, self.credits.ledger.next_issue)

    def _republish(self) -> Iterator[None]:
        self.stored_waivers = Waivers(list(self.credits.waivers.issues), list(self.credits.waivers.steps))
        for entry in self.credits.ledger.pending_entries():
            if entry.issue >= self.cursor:
                position = self.credits.position_of(entry.group_id)
                self._send_prompt(Ticket(entry.group_id, position, entry.issue, entry.seat, entry.min_step))
                yield
        self.cursor = self.credits.ledger.next_issue

    def _send_prompt(self, ticket: Ticket) -> None:
        if ticket.group_id not in self.prompt_ids:
            self.prompt_ids.add(ticket.group_id)
            self.prompts.append(ticket)

    # Rollouts and reward

    def pull(self, number: int) -> bool:
        if not self.prompts:
            return False
        self.rollouts[number].waiting.append(Sampled(self.prompts.pop(0)))
        return True

    def take_weights(self, number: int) -> bool:
        newest = len(self.versions) - 1
        changed = self.rollouts[number].version != newest
        self.rollouts[number].version = newest
        return changed

    def start_sampling(self, number: int, which: int = 0) -> bool:
        rollout = self.rollouts[number]
        able = [one for one in rollout.waiting if self.may_start(number, one)]
        if not able:
            return False
        chosen = able[which % len(able)]
        rollout.waiting.remove(chosen)
        chosen.version = rollout.version
        rollout.running.append(chosen)
        return True

    def may_start(self, number: int, one: Sampled) -> bool:
        waivers = self.stored_waivers if self.waive else Waivers()
        return self.versions[self.rollouts[number].version] >= waivers.min_step(one.group())

    def finish_sampling(self, number: int, which: int = 0) -> bool:
        running = self.rollouts[number].running
        if not running:
            return False
        self.scoring.append(running.pop(which % len(running)))
        return True

    def pull_again(self, which: int = 0) -> bool:
        """The broker has forgotten an ack, or the replica died just before it: a prompt is delivered that was sampled already."""
        known = [entry for entry in self.credits.ledger.entries.values() if entry.group_id in self.prompt_ids]
        if not known:
            return False
        entry = known[which % len(known)]
        ticket = Ticket(
            entry.group_id, self.credits.position_of(entry.group_id), entry.issue, entry.seat, entry.min_step
        )
        self.prompts.append(ticket)
        return True

    def kill_rollout(self, number: int) -> None:
        """What it held is delivered again, to whoever asks first."""
        rollout = self.rollouts[number]
        self.prompts = [one.ticket for one in (*rollout.running, *rollout.waiting)] + self.prompts
        self.rollouts[number] = Rollout(version=len(self.versions) - 1)

    def score(self, which: int = 0, drop: bool = False) -> bool:
        if not self.scoring:
            return False
        done = self.scoring.pop(which % len(self.scoring))
        if drop:
            self._drop(done.ticket, "zero_variance")
        elif done.ticket.group_id not in self.queued_ids:
            self.queued_ids.add(done.ticket.group_id)
            self.queue[done.ticket.group_id] = done
        return True

    def _drop(self, ticket: Ticket, reason: str) -> None:
        receipt = Receipt("dropped", ticket.group_id, ticket.issue, ticket.seat, ticket.min_step, reason=reason)
        self.publish(receipt, f"dropped:{ticket.group_id}")

    # The trainer

    def start_trainer(self, checkpoint: Checkpoint) -> None:
        self.saved = checkpoint
        self.step, self.rollbacks = checkpoint.step, list(checkpoint.rollbacks)
        self.window: Window[Sampled] = Window.restore(checkpoint.window)
        self.window_state = checkpoint.window
        self.trainer_folded = 0
        self.batch: list[Sampled] = []
        self.next_issue = checkpoint.next_issue
        self.uncovered: list[str] = []
        self.delivered: set[str] = set()

    def kill_trainer(self) -> None:
        """Back to the checkpoint, as new weights; what is not acknowledged comes again."""
        self.start_trainer(self.saved)
        self.versions.append(self.step)
        version = len(self.versions) - 1
        self.rollbacks.append((version, self.step))
        self.publish(Receipt("rollback", step=self.step, detail=self.rollback_detail()), f"rollback:{version}")

    def rollback_detail(self) -> dict[str, Any]:
        return {"version": len(self.versions) - 1}

    def receive(self, which: int = 0) -> bool:
        """A message, or the news of drops."""
        changed = self.trainer_folded < len(self.log)
        for receipt in self.log[self.trainer_folded :]:
            if receipt.kind == "dropped":
                self.window.drop(receipt.issue)
        self.trainer_folded = len(self.log)
        new = [group_id for group_id in self.queue if group_id not in self.delivered]
        if new:
            group_id = new[which % len(new)]
            self.delivered.add(group_id)
            if not self.window.offer(self.queue[group_id].ticket.issue, self.queue[group_id]):
                del self.queue[group_id]
        return changed or bool(new)

    def train(self) -> bool:
        """Take one group; when the batch is full, update and publish."""
        missing = self.step < self.rules.steps and len(self.batch) < self.rules.groups_per_step
        taken = self.window.take(1) if missing else []
        for _, group in taken:
            age = self.step - self._counted_step(group)
            if age > self.rules.max_staleness:
                self._drop(group.ticket, "stale")
                del self.queue[group.ticket.group_id]
            else:
                self.ages.append(age)
                self.batch.append(group)
        complete = len(self.batch) == self.rules.groups_per_step and self.may_update()
        if complete:
            self._update()
        return bool(taken) or complete

    def may_update(self) -> bool:
        return True

    def _update(self) -> None:
        for group in self.batch:
            at = group.ticket
            detail = {"version": len(self.versions) - 1}
            receipt = Receipt("trained", at.group_id, at.issue, at.seat, at.min_step, step=self.step, detail=detail)
            self.publish(receipt, f"trained:{at.group_id}:{len(self.versions)}")
            self.uncovered.append(at.group_id)
        self.batch = []
        self.step += 1
        self.versions.append(self.step)
        self.window_state = self.window.state()

    def checkpoint(self) -> None:
        """Durable first, acknowledged then."""
        self.saved = Checkpoint(self.step, self.window_state, list(self.rollbacks), self.next_issue)
        for group_id in self.uncovered:
            self.queue.pop(group_id, None)
        self.uncovered = []

    def _counted_step(self, group: Sampled) -> int:
        step = self.versions[group.version]
        for version, back_to in self.rollbacks:
            if group.version < version:
                step = min(step, back_to)
        return step

    # The end

    @property
    def over(self) -> bool:
        return self.step == self.rules.steps and self.credits.done and self.folded == len(self.log)

    def everybody(self) -> list[Callable[[], bool]]:
        """One step of each that can move the run on."""
        steps: list[Callable[[], bool]] = [self.controller_acts, self.score, self.receive, self.train]
        for number in range(len(self.rollouts)):
            for act in (self.take_weights, self.pull, self.start_sampling, self.finish_sampling):
                steps.append(lambda act=act, number=number: act(number))  # type: ignore[misc]
        return steps

    def finish(self) -> bool:
        """Everybody acts fairly until the run is over. False: a deadlock."""
        steps = self.everybody()
        while not self.over:
            if sum(act() for act in steps) == 0:
                return False
        return True
