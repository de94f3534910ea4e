"""The whole protocol as a model without I/O, one effect at a time: who may die, stop or wake up between any two of them.

An effect is one message stored, one ack, one checkpoint, one claim. The rules are the real ones: `Credits`, `Ledger`, `Window`,
`Waivers`, the formulas of staleness; what they stand on is modelled: work queues that deliver again, logs, checkpoints, versions.
The trainer is in protocol_trainer.py. Whoever is not the newest any more goes on as a zombie for as long as nothing fences it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.controller.credits import Rules, Ticket
from shared.records import Receipt
from shared.waivers import Waivers
from tests.chaos.protocol_trainer import Copy, Saved, Trainer
from tests.controller.world import World


@dataclass
class Queue:
    """A work queue: delivers until acknowledged, to whoever asks; remembers ids, but not for ever."""

    messages: dict[int, Any] = field(default_factory=dict)
    holders: dict[int, object] = field(default_factory=dict)
    ids: set[str] = field(default_factory=set)
    last: int = 0

    def publish(self, msg_id: str, payload: Any) -> None:
        if msg_id not in self.ids:
            self.ids.add(msg_id)
            self.last += 1
            self.messages[self.last] = payload

    def pull(self, holder: object, which: int = 0) -> int | None:
        free = [seq for seq in self.messages if seq not in self.holders]
        if not free:
            return None
        seq = free[which % len(free)]
        self.holders[seq] = holder
        return seq

    def ack(self, seq: int) -> None:
        self.messages.pop(seq, None)
        self.holders.pop(seq, None)

    def release(self, holder: object | None = None) -> None:
        """What `holder` has, or what anybody has, is delivered again."""
        self.holders = {seq: other for seq, other in self.holders.items() if holder not in (None, other)}


@dataclass
class Worker:
    """A rollout replica or a stage of the reward service: messages that it holds, by how far it has got."""

    version: int = 0
    waiting: dict[int, Any] = field(default_factory=dict)
    running: dict[int, Any] = field(default_factory=dict)
    stored: dict[int, Any] = field(default_factory=dict)


class Protocol(World):
    """`every`: updates between checkpoints. `last_first`: the last checkpoint comes before the last receipts."""

    def __init__(self, rules: Rules, every: int = 2, last_first: bool = True) -> None:
        self.every, self.last_first = every, last_first
        self.work = {name: Queue() for name in ("prompts", "rewards", "scored", "advantages")}
        self.trajectories: dict[str, Copy] = {}
        self.copies = 0
        self.saved: list[Saved] = []
        self.aside: list[Saved] = []
        self.claims = self.sequence = 0
        self.publisher: Trainer | None = None
        self.retired: list[Trainer] = []
        self.consumer: Trainer | None = None
        self.zombies: list[Trainer] = []
        super().__init__(rules, replicas=2)
        self.rollouts = [Worker(), Worker()]  # type: ignore[assignment]
        self.scorer, self.passer = Worker(), Worker()
        self.versions = []

    def _send_prompt(self, ticket: Ticket) -> None:
        self.prompt_ids.add(ticket.group_id)
        self.work["prompts"].publish(ticket.group_id, ticket)

    def start_trainer(self, _: Any = None) -> None:
        self.trainer = Trainer(self)

    # Rollouts: pull, start, store, acknowledge

    def pull(self, number: int, which: int = 0) -> bool:
        seq = self.work["prompts"].pull(self.rollouts[number], which)
        if seq is not None:
            self.rollouts[number].waiting[seq] = self.work["prompts"].messages[seq]  # type: ignore[call-overload]
        return seq is not None

    def take_weights(self, number: int) -> bool:
        newest, rollout = len(self.versions) - 1, self.rollouts[number]
        changed, rollout.version = rollout.version != newest, newest
        return changed

    def start_sampling(self, number: int, which: int = 0) -> bool:
        rollout: Any = self.rollouts[number]
        if not 0 <= rollout.version < len(self.versions):
            return False
        step = self.versions[rollout.version]
        able = [seq for seq, at in rollout.waiting.items() if step >= self.stored_waivers.min_step(group_of(at))]
        if not able:
            return False
        seq = able[which % len(able)]
        self.copies += 1
        rollout.running[seq] = Copy(rollout.waiting.pop(seq), rollout.version, self.copies)
        return True

    def finish_sampling(self, number: int, which: int = 0) -> bool:
        return self._store(self.rollouts[number], which, lambda copy: self._publish_copy("rewards", copy))

    def acknowledge_prompt(self, number: int, which: int = 0) -> bool:
        return self._acknowledge(self.rollouts[number], "prompts", which)

    def kill_rollout(self, number: int) -> None:
        self.work["prompts"].release(self.rollouts[number])
        self.rollouts[number] = Worker(version=len(self.versions) - 1)  # type: ignore[call-overload]

    # Reward: two stages, each pull, store, acknowledge

    def pull_stage(self, stage: int, which: int = 0) -> bool:
        worker, name = ((self.scorer, "rewards"), (self.passer, "scored"))[stage]
        seq = self.work[name].pull(worker, which)
        if seq is not None:
            worker.running[seq] = self.work[name].messages[seq]
        return seq is not None

    def store_stage(self, stage: int, which: int = 0) -> bool:
        return self._store((self.scorer, self.passer)[stage], which, (self._trajectory, self._pass_on)[stage])

    def acknowledge_stage(self, stage: int, which: int = 0) -> bool:
        return self._acknowledge((self.scorer, self.passer)[stage], ("rewards", "scored")[stage], which)

    def kill_reward(self) -> None:
        self.work["rewards"].release(self.scorer)
        self.work["scored"].release(self.passer)
        self.scorer, self.passer = Worker(), Worker()

    def _trajectory(self, copy: Copy) -> None:
        """The broker takes one a group, whatever it has forgotten."""
        if copy.ticket.group_id not in self.trajectories:
            self.trajectories[copy.ticket.group_id] = copy
            self.work["scored"].publish(f"{copy.ticket.group_id}", copy)

    def _pass_on(self, copy: Copy) -> None:
        """The filter's verdict depends on the samples."""
        if copy.number % 4 == 0:
            at = copy.ticket
            self.publish(
                Receipt("dropped", at.group_id, at.issue, at.seat, at.min_step, reason="zero_variance"),
                f"dropped:{at.group_id}",
            )
        else:
            self._publish_copy("advantages", copy)

    def _publish_copy(self, name: str, copy: Copy) -> None:
        self.work[name].publish(copy.ticket.group_id, copy)

    @staticmethod
    def _store(worker: Any, which: int, store: Callable[[Any], None]) -> bool:
        if not worker.running:
            return False
        seq = list(worker.running)[which % len(worker.running)]
        store(worker.running[seq])
        worker.stored[seq] = worker.running.pop(seq)
        return True

    def _acknowledge(self, worker: Any, name: str, which: int) -> bool:
        if not worker.stored:
            return False
        seq = list(worker.stored)[which % len(worker.stored)]
        del worker.stored[seq]
        self.work[name].ack(seq)
        return True

    def forget_ids(self) -> None:
        """The duplicate window of every stream runs out."""
        for queue in self.work.values():
            queue.ids.clear()
        self.log_ids.clear()

    # The trainer

    def train(self) -> bool:
        return self.trainer.act()

    def kill_trainer(self) -> None:
        self.work["advantages"].release(self.trainer)
        self.start_trainer()

    def stop_trainer(self) -> None:
        """It stands still, its launcher starts another, and then it goes on where it was."""
        self.zombies = [*self.zombies, self.trainer][-2:]
        self.start_trainer()

    def zombie_acts(self, which: int = 0) -> bool:
        if not self.zombies:
            return False
        zombie = self.zombies[which % len(self.zombies)]
        moved = zombie.act()
        if zombie.ended:
            self.zombies.remove(zombie)
        return moved

    def damage(self) -> None:
        """The newest checkpoint is found damaged when the next trainer starts."""
        if len(self.saved) > 1:
            self.aside.append(self.saved.pop())
            self.kill_trainer()

    # The end

    @property
    def over(self) -> bool:
        return self.trainer.done and self.credits.done and self.folded == len(self.log)

    def everybody(self) -> list[Callable[[], bool]]:
        steps: list[Callable[[], bool]] = [self.controller_acts, self.train]
        for number in range(2):
            for act in (
                self.take_weights,
                self.pull,
                self.start_sampling,
                self.finish_sampling,
                self.acknowledge_prompt,
            ):
                steps.append(lambda act=act, number=number: act(number))  # type: ignore[misc]
            for act in (self.pull_stage, self.store_stage, self.acknowledge_stage):
                steps.append(lambda act=act, number=number: act(number))  # type: ignore[misc]
        return steps

    def finish(self) -> bool:
        self.zombies.clear()
        return super().finish()


def group_of(ticket: Ticket) -> Any:
    """As much of a group as waivers look at."""
    return ticket


assert Waivers.min_step  # they read `issue` and `min_step`, which a ticket has
