"""What the trainer adds to advantages before the first micro-batch: pure functions of the update's groups.

G samples of a group, N tokens of them, T trained tokens of the longest sample, K trained tokens in all.

The reward service computes what one group decides (services/reward/advantages). Here is what it cannot: a KL taken from the
reward, returns and GAE from token columns, and what the whole update decides - the deviation of all rewards (`batch_std`) and
whitening. `needs_whole_update` says when the trainer must hold the P groups of an update before it may begin with the first;
otherwise each group can be finished as it comes. The result depends on the groups only, not on their order, packing or ranks.

Tokens that an environment wrote, or that have no finite number somewhere, take no part: returns, discounts and GAE go from one
trained token to the next, so credit passes over a tool's answer. A sample without a score has advantage 0 and enters no
statistic. `tests/trainer/test_advantages.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.reward.advantages import group_advantages, shaped_rewards
from services.trainer.algorithms.kl import estimate
from shared import columns
from shared.config import RunConfig
from shared.records import Group

WHITEN_EPSILON = 1e-8
"""Added to the variance, as in OpenRLHF, slime and verl."""


@dataclass(frozen=True, slots=True)
class TokenAdvantages:
    """What the tokens of a group have earned."""

    advantages_N: np.ndarray
    """f32; 0 where a token is not trained."""
    returns_N: np.ndarray | None = None
    """f32: what the critic learns, for `gae`."""


def needs_whole_update(run: RunConfig) -> bool:
    """The advantage of a token depends on other groups of the update."""
    advantage = run.algorithm.advantage
    return advantage.whiten or (advantage.name == "group" and advantage.scale == "batch_std")


def token_advantages(groups: Sequence[Group], run: RunConfig) -> list[TokenAdvantages]:
    """One a group. `groups`: those of the whole update if `needs_whole_update`, else any of them."""
    options = run.algorithm.advantage
    tables = [_table(group, run) for group in groups]
    found = [_of_group(group, table, run) for group, table in zip(groups, tables, strict=True)]
    advantages = [advantages_N for advantages_N, _ in found]
    if options.name == "group" and options.scale == "batch_std":
        scale = _deviation(np.concatenate([table.rewards_G for table in tables])) + options.epsilon
        advantages = [advantages_N / scale for advantages_N in advantages]
    if options.whiten:
        advantages = _whitened(advantages, [table.scored_K for table in tables])
    return [
        TokenAdvantages(advantages_N.astype("<f4"), None if returns_N is None else returns_N.astype("<f4"))
        for advantages_N, (_, returns_N) in zip(advantages, found, strict=True)
    ]


def discounted_sums(values_GT: np.ndarray, factor: float) -> np.ndarray:
    """[G, T] sum over k >= t of factor^(k - t) values_k."""
    sums_GT = values_GT.copy()
    for place in range(values_GT.shape[1] - 2, -1, -1):
        sums_GT[:, place] += factor * sums_GT[:, place + 1]
    return sums_GT


def gae(
    rewards_GT: np.ndarray, values_GT: np.ndarray, counts_G: np.ndarray, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """([G, T] advantages, [G, T] returns). What follows a sample's last token is worth nothing."""
    inside_GT = np.arange(values_GT.shape[1]) < counts_G[:, None]
    values_GT = np.where(inside_GT, values_GT, 0.0)
    following_GT = np.concatenate([values_GT[:, 1:], np.zeros_like(values_GT[:, :1])], axis=1)
    errors_GT = np.where(inside_GT, rewards_GT + gamma * following_GT - values_GT, 0.0)
    advantages_GT = discounted_sums(errors_GT, gamma * lam)
    return advantages_GT, advantages_GT + values_GT


@dataclass(frozen=True, slots=True)
class _Table:
    """A group's trained tokens as a matrix [G, T], each sample's from the left, and its rewards."""

    size: int
    """N."""
    index_K: np.ndarray
    """Place of each trained token in N."""
    row_K: np.ndarray
    place_K: np.ndarray
    counts_G: np.ndarray
    scores_G: np.ndarray
    """NaN without a score."""
    penalty_N: np.ndarray
    """What a KL takes from each token's reward."""

    def matrix(self, values_N: np.ndarray) -> np.ndarray:
        """[G, T], zeros on the right."""
        values_GT = np.zeros((len(self.counts_G), int(self.counts_G.max(initial=0))))
        values_GT[self.row_K, self.place_K] = values_N[self.index_K]
        return values_GT

    def flat(self, values_GT: np.ndarray) -> np.ndarray:
        """[N], zeros where a token is not trained."""
        values_N = np.zeros(self.size)
        values_N[self.index_K] = values_GT[self.row_K, self.place_K]
        return values_N

    @property
    def rewards_G(self) -> np.ndarray:
        """What each sample is rewarded with in all."""
        return self.scores_G - self.matrix(self.penalty_N).sum(axis=1)

    @property
    def token_rewards_GT(self) -> np.ndarray:
        """The same by token: the score comes with the last one."""
        rewards_GT = -self.matrix(self.penalty_N)
        ends = np.flatnonzero(self.counts_G > 0)
        rewards_GT[ends, self.counts_G[ends] - 1] += np.nan_to_num(self.scores_G)[ends]
        return rewards_GT

    @property
    def scored_K(self) -> np.ndarray:
        """Places in N of the trained tokens of samples with a score."""
        return self.index_K[~np.isnan(self.scores_G)[self.row_K]]


def _table(group: Group, run: RunConfig) -> _Table:
    samples = group.samples
    if samples is None or group.rewards is None or group.advantages is None:
        raise ValueError(f"{group.id}: no samples, rewards or advantages; the reward service must fill them first")
    if problem := columns.missing(group, columns.needed(run)):
        raise ValueError(problem)
    trained_N = (samples.mask != 0) & np.isfinite(samples.logprobs)
    for name in columns.needed(run).keys() & group.columns.keys():
        column = group.columns[name]
        trained_N &= np.isfinite(column).all(axis=tuple(range(1, column.ndim)))
    index_K = np.flatnonzero(trained_N)
    row_K = np.repeat(np.arange(len(samples.lengths)), samples.lengths)[index_K]
    counts_G = np.bincount(row_K, minlength=len(samples.lengths))
    place_K = np.arange(len(index_K)) - (np.cumsum(counts_G) - counts_G)[row_K]
    scores_G = shaped_rewards(group.rewards.total, samples.lengths, run.algorithm, run.sampling.max_new_tokens)
    return _Table(len(trained_N), index_K, row_K, place_K, counts_G, scores_G, _penalty(group, run))


def _penalty(group: Group, run: RunConfig) -> np.ndarray:
    """[N] what the KL takes from each token's reward: under the policy that sampled, as the reward is."""
    kl, samples = run.algorithm.kl, group.samples
    assert samples is not None
    if not _shapes_reward(run):
        return np.zeros(len(samples.ids))
    gap_N = samples.logprobs.astype(np.float64) - group.columns["reference_logprobs"]
    return kl.coef * estimate(torch.from_numpy(gap_N), kl.estimator).numpy()


def _shapes_reward(run: RunConfig) -> bool:
    return run.algorithm.kl.coef > 0 and run.algorithm.kl.use == "reward"


def _of_group(group: Group, table: _Table, run: RunConfig) -> tuple[np.ndarray, np.ndarray | None]:
    """([N] advantages, [N] returns or None), before anything that other groups decide."""
    options = run.algorithm.advantage
    scored_G1 = ~np.isnan(table.scores_G)[:, None]
    if options.name == "returns":
        advantages_GT = discounted_sums(table.token_rewards_GT, options.gamma)
        return table.flat(np.where(scored_G1, advantages_GT, 0.0)), None
    if options.name == "gae":
        values_GT = table.matrix(group.columns["values"])
        advantages_GT, returns_GT = gae(table.token_rewards_GT, values_GT, table.counts_G, options.gamma, options.lam)
        learnt_GT = np.where(scored_G1, returns_GT, values_GT)  # nothing to learn where nothing was scored
        return table.flat(np.where(scored_G1, advantages_GT, 0.0)), table.flat(learnt_GT)
    advantages_G = group_advantages(table.rewards_G, options) if _shapes_reward(run) else group.advantages
    assert advantages_G is not None
    if len(advantages_G) != len(table.counts_G):  # one a token already
        return table.flat(table.matrix(advantages_G)), None
    shape = len(table.counts_G), int(table.counts_G.max(initial=0))
    return table.flat(np.broadcast_to(advantages_G[:, None], shape)), None


def _deviation(rewards: np.ndarray) -> float:
    scored = rewards[~np.isnan(rewards)]
    return float(scored.std(ddof=1)) if len(scored) > 1 else 0.0


def _whitened(advantages: list[np.ndarray], places: list[np.ndarray]) -> list[np.ndarray]:
    """Mean 0 and sample variance 1 over the chosen tokens of all groups; 0 elsewhere."""
    chosen = [advantages_N[place_K] for advantages_N, place_K in zip(advantages, places, strict=True)]
    values = np.concatenate(chosen)
    whitened = [np.zeros_like(advantages_N) for advantages_N in advantages]
    if len(values) < 2:
        return whitened
    deviation = np.sqrt(values.var(ddof=1) + WHITEN_EPSILON)
    for advantages_N, place_K, values_K in zip(whitened, places, chosen, strict=True):
        advantages_N[place_K] = (values_K - values.mean()) / deviation
    return whitened
