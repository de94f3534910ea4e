"""The controller's numbers for each update, folded from the receipts. Pure; `tests/controller/test_evaluation.py`.

reward            mean over the groups trained in the update
reward_scored     mean over all groups scored since the update before, those that a filter dropped included
staleness_mean    updates between the oldest weights that drew a sample and the update, over its samples; staleness_max
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean

from shared.records import Receipt


@dataclass(slots=True)
class Stats:
    """Feed it the receipts that changed the ledger."""

    rewards: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    ages: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    dropped_rewards: list[float] = field(default_factory=list)
    newest: tuple[int, float] | None = None
    """(step, reward) of the last complete update."""

    def apply(self, receipt: Receipt) -> None:
        if receipt.kind == "rollback":
            for step in [step for step in (*self.rewards, *self.ages) if step >= receipt.step]:
                self.rewards.pop(step, None)
                self.ages.pop(step, None)
        elif receipt.kind == "trained":
            if receipt.reward is not None:
                self.rewards[receipt.step].append(receipt.reward)
            if receipt.sample_steps is not None:
                self.ages[receipt.step] += [receipt.step - old for old in receipt.sample_steps.tolist() if old >= 0]
        elif receipt.kind == "dropped" and receipt.reward is not None:
            self.dropped_rewards.append(receipt.reward)

    def close(self, update: int) -> dict[str, float]:
        """The numbers of an update that is complete; they are forgotten here."""
        rewards, ages = self.rewards.pop(update, []), self.ages.pop(update, [])
        scored, self.dropped_rewards = [*rewards, *self.dropped_rewards], []
        values: dict[str, float] = {}
        if rewards:
            values["reward"] = fmean(rewards)
            self.newest = (update + 1, values["reward"])
        if scored:
            values["reward_scored"] = fmean(scored)
        if ages:
            values |= {"staleness_mean": fmean(ages), "staleness_max": max(ages)}
        return values
