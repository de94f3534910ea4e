"""The models beside the policy in the trainer's process: the critic, and the reference with `place: trainer`. And who writes the
reference for a process of its own.

    fill(group)    before the group becomes micro-batches: the columns `values` and `reference_logprobs`
    learn(groups)  once the update has all its groups: the critic's own update, on returns made from the values before it
    moved(step)    after the policy's update: a reference that is due is the policy of this moment

N tokens of a group. The reference is a second set of weights for the one model, exchanged for the time of scoring, so it costs
the weights' memory and nothing else. Both are part of the checkpoint, so a trainer that was killed goes on with them bit for
bit, and both are shared by the trainer's ranks as the policy is. Not thread-safe: the computing thread alone.
`tests/trainer/test_roles.py`.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from services.trainer import references
from services.trainer.advantages import token_advantages
from services.trainer.algorithms.reductions import merge
from services.trainer.batches import TrainSample
from services.trainer.objectives import Objective
from services.trainer.ranks import RankedPolicy
from services.trainer.samples import critic_samples
from services.trainer.schedule import learning_rate
from services.trainer.spread import spread
from shared import columns
from shared.algorithms import PpoConfig
from shared.config import RunConfig
from shared.records import Group

CRITIC = "critic/"
"""Prefix in a checkpoint."""


class Roles:
    """`begin` for a new run, or `restore` for one that goes on, after this and before the policy's own."""

    def __init__(self, config: RunConfig, policy: RankedPolicy) -> None:
        self.config, self.policy = config, policy
        wanted = columns.needed(config)
        place = config.reference.place if config.reference is not None else None
        self.holds_reference = "reference_logprobs" in wanted and place == "trainer"
        if self.holds_reference:
            policy.hold_reference()
        self.critic: RankedPolicy | None = None
        if "values" in wanted and config.critic is not None:
            folder = policy.folder if config.critic.path is None else config.path(config.critic.path)
            self.critic = policy.ranks.add("critic", folder, "critic")

    def begin(self) -> None:
        """Before the first update: the policy as it is now is the reference and the critic's body, unless folders are named."""
        reference, critic = self.config.reference, self.config.critic
        if self.holds_reference and reference is not None and reference.path is not None:
            self.policy.hold_reference(self.config.path(reference.path))
        if self.critic is not None and critic is not None and critic.path is None:
            self.critic.copy_weights(self.policy)
        if reference is not None and reference.place == "service":
            references.forget(self.config, after=-1)
        self._take_reference(0)

    def fill(self, group: Group) -> None:
        """Add the columns that are made here."""
        if self.holds_reference:
            group.columns["reference_logprobs"] = score(self.policy, group, self.config, by_reference=True)
        if self.critic is not None:
            group.columns["values"] = score(self.critic, group, self.config)

    def learn(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """One update of the critic; its metrics."""
        if self.critic is None or self.config.critic is None:
            return {}
        options = self.config.algorithm
        clip = options.value_clip if isinstance(options, PpoConfig) else None
        loss = Objective("critic", constants={"value_clip": clip})
        found = token_advantages(groups, self.config)
        samples = itertools.chain.from_iterable(map(critic_samples, groups, found))
        units = ((sample,) for sample in samples)
        parts = spread(units, self.config.trainer.micro_batch_tokens, self.critic.layout)
        sums = merge(self.critic.forward_backward(part, loss) for part in parts)
        rate = learning_rate(step, self.config.steps, self.config.critic.optimizer)
        outcome = self.critic.update(sums["denominator"], rate)
        count = max(sums["tokens"], 1.0)
        means = {name: sums[name] / count for name in ("value", "return", "value_error", "value_clip_fraction")}
        loss_mean = sums["loss"] / max(sums["denominator"], 1.0)
        named = {"loss": loss_mean, "grad_norm": outcome["grad_norm"], "lr": outcome["lr"]}
        return {f"critic_{name.removeprefix('value_')}": value for name, value in (means | named).items()}

    def policy_waits(self, step: int) -> bool:
        """Update `step` (from 0) is the critic's alone."""
        return self.config.critic is not None and step < self.config.critic.warmup_steps

    def moved(self, step: int) -> None:
        """The policy has made its update number `step`."""
        if step > 0:
            self._take_reference(step)

    def _take_reference(self, step: int) -> None:
        reference = self.config.reference
        if reference is None or not references.due(self.config, step):
            return
        if self.holds_reference:
            self.policy.hold_reference()
        elif reference.place == "service":
            target = references.folder(self.config, step)
            partial_folder = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.rmtree(partial_folder, ignore_errors=True)
            self.policy.save_hf(partial_folder)
            shutil.rmtree(target, ignore_errors=True)
            partial_folder.rename(target)
            references.forget(self.config, after=step)

    # ---- checkpoints

    @property
    def states(self) -> dict[str, str]:
        """The models whose state a checkpoint holds, and the prefix of each in it. The policy's has the reference in it."""
        return {self.policy.name: ""} | ({} if self.critic is None else {self.critic.name: CRITIC})

    def restore(self, folder: Path, step: int) -> None:
        """Restore what was saved at `step`. StateMismatch if it was saved without a critic."""
        if self.critic is not None:
            self.critic.restore(folder, CRITIC)
        if self.config.reference is not None and self.config.reference.place == "service":
            references.forget(self.config, after=step)


def score(model: RankedPolicy, group: Group, config: RunConfig, by_reference: bool = False) -> np.ndarray:
    """[N] what the model says of each token: a policy its log-probability, a critic its value. 0 where the mask is unset."""
    samples, prompt_ids = group.samples, group.prompt_ids
    assert samples is not None
    assert prompt_ids is not None
    column = np.zeros(len(samples.ids), dtype="<f4")
    parts = [
        TrainSample(
            group_id=group.id,
            ids=np.concatenate([prompt_ids, samples.ids[start:end]]),
            prompt_len=len(prompt_ids),
            mask=samples.mask[start:end],
            logprobs=np.zeros(end - start, dtype="<f4"),
            advantage=0.0,
            extras={"place": np.arange(start, end)},
        )
        for start, end in itertools.pairwise(samples.offsets.tolist())
        if end > start
    ]
    for one in spread(((part,) for part in parts), config.trainer.micro_batch_tokens, model.layout):
        found = model.score(one, config.sampling.temperature, by_reference=by_reference)
        for batch, scores in zip(one.batches, found, strict=True):
            column[batch.extras["place"]] = scores.logprobs_N.float().numpy()
    return column
