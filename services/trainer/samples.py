"""From groups to what the packer takes: a sample's tokens, its advantages, and the columns that the loss needs. Pure.

N completion tokens of a group, C of a sample. Which columns travel with a group: shared/columns.py. What they become here:

    reference_logprobs, teacher_logprobs, teacher_top_ids, teacher_top_logprobs   as they are, for the policy's loss
    age                   how many updates old the weights were that drew the token (old_logprobs: interpolated)
    values, returns       for the critic's loss

`tests/trainer/test_samples.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from services.trainer.advantages import TokenAdvantages
from services.trainer.batches import TrainSample
from shared import columns
from shared.config import RunConfig
from shared.records import Group


def policy_samples(group: Group, found: TokenAdvantages, run: RunConfig, update: int) -> Iterator[TrainSample]:
    """The group's samples for update `update` (0-based) of the policy."""
    extras = {name: column for name, column in _columns(group, run).items() if name != "values"}
    if run.algorithm.old_logprobs == "interpolated":
        extras["age"] = token_ages(group, update)
    return _samples(group, found.advantages_N, extras)


def critic_samples(group: Group, found: TokenAdvantages) -> Iterator[TrainSample]:
    """The group's samples for the critic."""
    if found.returns_N is None:
        raise ValueError(f"{group.id}: only 'gae' advantages have returns for a critic to learn")
    return _samples(group, found.advantages_N, {"values": group.columns["values"], "returns": found.returns_N})


def token_ages(group: Group, update: int) -> np.ndarray:
    """[N] f32 how many updates ago each token's weights were current; 0 where a rollback took those weights back."""
    samples = group.samples
    assert samples is not None
    order_K = np.argsort(samples.span_sample, kind="stable")  # a sample's own spans follow each other already
    lengths_K = (samples.span_end - samples.span_start)[order_K]
    return np.repeat(np.maximum(update - samples.span_step[order_K], 0), lengths_K).astype("<f4")


def _columns(group: Group, run: RunConfig) -> dict[str, np.ndarray]:
    if problem := columns.missing(group, columns.needed(run)):
        raise ValueError(problem)
    have: dict[str, np.ndarray] = {**group.columns, **group.id_columns}
    return {name: have[name] for name in columns.needed(run)}


def _samples(group: Group, advantages_N: np.ndarray, extras: Mapping[str, np.ndarray]) -> Iterator[TrainSample]:
    samples, prompt_ids = group.samples, group.prompt_ids
    assert samples is not None
    assert prompt_ids is not None
    for start, end in itertools.pairwise(samples.offsets.tolist()):
        yield TrainSample(
            group_id=group.id,
            ids=np.concatenate([prompt_ids, samples.ids[start:end]]),
            prompt_len=len(prompt_ids),
            mask=samples.mask[start:end],
            logprobs=samples.logprobs[start:end],
            advantage=advantages_N[start:end],
            extras={name: column[start:end] for name, column in extras.items()},
        )
