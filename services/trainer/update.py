"""The groups of one update become micro-batches, as early as the algorithm allows. Pure.

Most algorithms let a group be trained on as soon as it is there. One whose advantages or loss depend on the whole update
(whitening, the deviation of all rewards, m2po's band) gets no micro-batch before the last group has come. Either way every group
is in exactly one update, and the micro-batches depend on the groups and their order only. `tests/trainer/test_update.py`.
"""

from __future__ import annotations

from services.trainer.advantages import needs_whole_update, token_advantages
from services.trainer.algorithms import needs_first_pass
from services.trainer.batches import PackedBatch, Packer
from services.trainer.samples import policy_samples
from shared.config import RunConfig
from shared.records import Group


class UpdateBatches:
    """One for each update."""

    def __init__(self, run: RunConfig, update: int) -> None:
        self.run, self.update = run, update
        self.groups: list[Group] = []
        self._whole = needs_whole_update(run) or needs_first_pass(run.algorithm)
        self._packer = Packer(run.trainer.micro_batch_tokens)

    @property
    def complete(self) -> bool:
        """The update has all its groups."""
        return len(self.groups) == self.run.groups_per_step

    def add(self, group: Group) -> list[PackedBatch]:
        """Take the next group; the micro-batches that can be trained on now."""
        self.groups.append(group)
        if self._whole and not self.complete:
            return []
        ready = self.groups if self._whole else [group]
        batches = []
        for one, found in zip(ready, token_advantages(ready, self.run), strict=True):
            for sample in policy_samples(one, found, self.run, self.update):
                batches += self._packer.add(sample)
        return batches + (self._packer.flush() if self.complete else [])
