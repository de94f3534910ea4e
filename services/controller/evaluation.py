"""When the held-out prompts are asked, and what came of it. A pure state machine.

An evaluation is due before the first step, every `every` steps, and after the last one. Only the newest that is due is started,
and none but the last while another is still running: a slow evaluation must not pile up behind fast steps. Evaluation groups
take no credits; their ids are `eval-<step>-<index>`, and a receipt `evaluated` (with a reward, or with a reason why there is
none) ends each. `tests/controller/test_evaluation.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from shared.ledger import is_eval
from shared.records import Receipt


@dataclass(slots=True)
class Evaluations:
    """`due` says which to start, `started` notes it, `apply` folds receipts."""

    steps: int
    every: int
    prompts: int
    """Held-out prompts, 0: no evaluation at all."""
    begun: list[int] = field(default_factory=list)
    """Steps whose evaluation was started; kept in KV."""
    rewards: dict[int, dict[int, float | None]] = field(default_factory=dict)
    """By step and index."""
    oldest: dict[int, int] = field(default_factory=dict)
    """By step, the step of the oldest weights that drew an answer."""

    def due(self, step: int) -> int | None:
        """The evaluation to start now that `step` updates are done."""
        if not self.prompts:
            return None
        if step >= self.steps:
            mark = self.steps
        else:
            mark = step // self.every * self.every if self.every else 0
            if mark == 0 < step or not all(map(self.complete, self.begun)):
                return None
        return None if mark in self.begun else mark

    def started(self, mark: int) -> None:
        self.begun.append(mark)

    def apply(self, receipt: Receipt) -> int | None:
        """Fold one receipt. The step of the evaluation that it completes, or None."""
        if receipt.kind not in ("evaluated", "dropped") or not is_eval(receipt.group_id):
            return None
        _, step, index = receipt.group_id.split("-")
        mark, rewards = int(step), self.rewards.setdefault(int(step), {})
        if int(index) in rewards:
            return None
        rewards[int(index)] = receipt.reward
        if receipt.sample_steps is not None and len(drawn := receipt.sample_steps[receipt.sample_steps >= 0]):
            self.oldest[mark] = min(self.oldest.get(mark, int(drawn.min())), int(drawn.min()))
        return mark if self.complete(mark) else None

    def complete(self, mark: int) -> bool:
        return len(self.rewards.get(mark, {})) >= self.prompts

    def scored(self, mark: int) -> list[float]:
        return [reward for reward in self.rewards.get(mark, {}).values() if reward is not None]

    def mean(self, mark: int) -> float | None:
        """Over what could be scored; None if nothing could."""
        scored = self.scored(mark)
        return fmean(scored) if scored else None

    def means(self) -> dict[int, float | None]:
        """Of the complete ones."""
        return {mark: self.mean(mark) for mark in sorted(self.rewards) if self.complete(mark)}
