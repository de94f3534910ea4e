"""The models beside the policy in the trainer's process: the critic, and the reference with `place: trainer`. And who writes the
reference for a process of its own.

    fill(group)    before the group becomes micro-batches: the columns `values` and `reference_logprobs`
    learn(groups)  once the update has all its groups: the critic's own update, on returns made from the values before it
    moved(step)    after the policy's update: a reference that is due is the policy of this moment

N tokens of a group. The reference is a second set of weights for the one model, exchanged for the time of scoring, so it costs
the weights' memory and nothing else. Both are part of the checkpoint (`state_dict`), so a trainer that was killed goes on with
them bit for bit. Not thread-safe: the computing thread alone. `tests/trainer/test_roles.py`.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from services.trainer import references
from services.trainer.advantages import token_advantages
from services.trainer.algorithms.ppo import critic as critic_loss
from services.trainer.algorithms.reductions import merge
from services.trainer.batches import TrainSample, pack
from services.trainer.megatron.critic import Critic
from services.trainer.megatron.policy import Policy, StateMismatch
from services.trainer.megatron.weights import load_hf
from services.trainer.samples import critic_samples
from services.trainer.schedule import learning_rate
from shared import columns
from shared.algorithms import PpoConfig
from shared.config import RunConfig
from shared.records import Group

CRITIC, REFERENCE = "critic.", "reference."
"""Prefixes in a checkpoint."""


class Roles:
    """`begin` for a new run, or `load_state_dict` for one that goes on."""

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        self.config, self.policy = config, policy
        wanted = columns.needed(config)
        self.reference: Weights | None = None
        if "reference_logprobs" in wanted and config.reference is not None and config.reference.place == "trainer":
            self.reference = Weights(policy)
        self.critic: Critic | None = None
        if "values" in wanted and config.critic is not None:
            folder = policy.folder if config.critic.path is None else config.path(config.critic.path)
            options = config.trainer.model_copy(update={"optimizer": config.critic.optimizer})
            critic = Critic.create(folder, options, policy.device.type, dtype=config.model.dtype, seed=config.seed)
            assert isinstance(critic, Critic)
            self.critic = critic

    def begin(self) -> None:
        """Before the first update: the policy as it is now is the reference and the critic's body, unless folders are named."""
        reference, critic = self.config.reference, self.config.critic
        if self.reference is not None and reference is not None and reference.path is not None:
            with self.reference.in_place():
                load_hf(self.policy.model, self.config.path(reference.path), self.policy.architecture)
        if self.critic is not None and critic is not None and critic.path is None:
            self.critic.set_weights(self.policy)
        if reference is not None and reference.place == "service":
            references.forget(self.config, after=-1)
        self._take_reference(0)

    def fill(self, group: Group) -> None:
        """Add the columns that are made here."""
        if self.reference is not None:
            with self.reference.in_place():
                scored = score(self.policy, group, self.config)
            group.columns["reference_logprobs"] = scored
        if self.critic is not None:
            group.columns["values"] = score(self.critic, group, self.config)

    def learn(self, groups: Sequence[Group], step: int) -> dict[str, float]:
        """One update of the critic; its metrics."""
        if self.critic is None or self.config.critic is None:
            return {}
        options = self.config.algorithm
        loss = partial(critic_loss, value_clip=options.value_clip if isinstance(options, PpoConfig) else None)
        found = token_advantages(groups, self.config)
        samples = itertools.chain.from_iterable(map(critic_samples, groups, found))
        batches = pack(samples, self.config.trainer.micro_batch_tokens)
        sums = merge(self.critic.forward_backward(batch, loss) for batch in batches)
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
        if self.reference is not None:
            self.reference.take()
        elif reference.place == "service":
            target = references.folder(self.config, step)
            partial_folder = target.with_name(f".{target.name}.{os.getpid()}")
            shutil.rmtree(partial_folder, ignore_errors=True)
            self.policy.save_hf(partial_folder)
            shutil.rmtree(target, ignore_errors=True)
            partial_folder.rename(target)
            references.forget(self.config, after=step)

    # ---- checkpoints

    def state_dict(self) -> dict[str, torch.Tensor]:
        """To be saved beside the policy's. Shares memory."""
        state: dict[str, torch.Tensor] = {}
        if self.reference is not None:
            state |= {f"{REFERENCE}{name}": tensor for name, tensor in self.reference.tensors.items()}
        if self.critic is not None:
            own = self.critic.state_dict()
            state |= {f"{CRITIC}{name}": tensor for name, tensor in own.items() if not name.startswith("rng.")}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor], step: int) -> None:
        """Restore what `state_dict` gave at `step`."""
        if self.reference is not None:
            saved = _below(state, REFERENCE)
            if saved.keys() != self.reference.tensors.keys():
                raise StateMismatch("the checkpoint holds no reference of this model; start the run anew")
            for name, tensor in self.reference.tensors.items():
                tensor.copy_(saved[name])
        if self.critic is not None:
            rng = {name: tensor for name, tensor in state.items() if name.startswith("rng.")}
            self.critic.load_state_dict(_below(state, CRITIC) | rng)
        if self.config.reference is not None and self.config.reference.place == "service":
            references.forget(self.config, after=step)


class Weights:
    """A second set of weights for a policy's model."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.tensors = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}

    @torch.no_grad()
    def take(self) -> None:
        """Become the policy of this moment."""
        for name, parameter in self.policy.model.named_parameters():
            self.tensors[name].copy_(parameter)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While this lasts, the model computes with these weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for name, parameter in self.policy.model.named_parameters():
            parameter.data, self.tensors[name] = self.tensors[name], parameter.data


def score(model: Policy, group: Group, config: RunConfig) -> np.ndarray:
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
    for batch in pack(parts, config.trainer.micro_batch_tokens):
        values_N, _ = model.logprobs(batch, config.sampling.temperature)
        column[batch.extras["place"]] = values_N.float().cpu().numpy()
    return column


def _below(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
