"""From the scores of one group to its advantages, one file a rule. Pure numpy.

G samples of the group. A score that is NaN (unscorable) is left out of every mean and deviation and gets advantage 0. What
needs the whole update - `batch_std`, whitening, returns, GAE - is finished by the trainer (services/trainer/advantages.py), which
starts from what is computed here. `tests/reward/test_advantages.py`.
"""

from __future__ import annotations

import numpy as np

from services.reward.advantages.group import group
from services.reward.advantages.leave_one_out import leave_one_out
from services.reward.advantages.overlong import overlong_penalty
from shared.algorithms import AdvantageConfig, DapoConfig, PolicyOptions


def shaped_rewards(
    rewards_G: np.ndarray, lengths_G: np.ndarray, algorithm: PolicyOptions, max_new_tokens: int
) -> np.ndarray:
    """[G] the scores with what the algorithm takes from them for their length."""
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    if isinstance(algorithm, DapoConfig) and algorithm.overlong_buffer:
        rewards_G = rewards_G - overlong_penalty(
            lengths_G, max_new_tokens, algorithm.overlong_buffer, algorithm.overlong_penalty
        )
    return rewards_G


def group_advantages(rewards_G: np.ndarray, options: AdvantageConfig) -> np.ndarray:
    """[G] f32. `reward`, `returns` and `gae` give the score itself; `batch_std` is centred only."""
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    if options.name == "group":
        advantages_G = group(rewards_G, options.scale, options.epsilon)
    elif options.name == "leave_one_out":
        advantages_G = leave_one_out(rewards_G)
    else:
        advantages_G = np.where(np.isnan(rewards_G), 0.0, rewards_G)
    return advantages_G.astype("<f4")
