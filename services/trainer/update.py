"""The groups of one update become spreads of micro-batches, as early as the algorithm allows. Pure.

Most algorithms let a group be trained on as soon as it is there. One whose advantages or loss depend on the whole update
(whitening, the deviation of all rewards, m2po's band) gets no micro-batch before the last group has come. Either way every group
is in exactly one update, and the micro-batches depend on the groups and their order only. `tests/trainer/test_update.py`.
"""

from __future__ import annotations

from services.trainer.advantages import needs_whole_update, token_advantages
from services.trainer.algorithms import needs_first_pass
from services.trainer.layout import layout_of
from services.trainer.samples import policy_samples
from services.trainer.spread import Spread, Spreader
from shared.config import RunConfig
from shared.records import Group


class UpdateBatches:
    """One for each update."""

    def __init__(self, run: RunConfig, update: int) -> None:
        self.run, self.update = run, update
        self.groups: list[Group] = []
        self._whole = needs_whole_update(run) or needs_first_pass(run.algorithm)
        self._spreader = Spreader(run.trainer.micro_batch_tokens, layout_of(run.trainer.megatron, run.trainer.ranks))

    @property
    def complete(self) -> bool:
        """The update has all its groups."""
        return len(self.groups) == self.run.groups_per_step

    def add(self, group: Group) -> list[Spread]:
        """Take the next group; the spreads that can be trained on now."""
        self.groups.append(group)
        if self._whole and not self.complete:
            return []
        ready = self.groups if self._whole else [group]
        found_spreads: list[Spread] = []
        for one, found in zip(ready, token_advantages(ready, self.run), strict=True):
            for sample in policy_samples(one, found, self.run, self.update):
                found_spreads += self._spreader.add(sample)
        return found_spreads + (self._spreader.flush() if self.complete else [])
