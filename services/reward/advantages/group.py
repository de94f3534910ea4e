"""GRPO's advantage and its variants: the reward minus the mean of its group, scaled.

    std              / (sample deviation + epsilon)    GRPO, arXiv 2402.03300; epsilon 1e-4 in TRL, torchforge; 1e-6 elsewhere
    population_std   / (population deviation + epsilon)
    mean             / mean, 0 where the mean is not above 0                                                           MaxRL
    none, batch_std  nothing (Dr.GRPO, arXiv 2503.20783); batch_std is divided by the trainer

A group of one, or whose scores are all equal, gets exact zeros: dividing rounding noise by epsilon would blow it up.
"""

from __future__ import annotations

import numpy as np


def group(rewards_G: np.ndarray, scale: str = "std", epsilon: float = 1e-4) -> np.ndarray:
    """[G]"""
    advantages_G = np.zeros(len(rewards_G))
    scored_G = ~np.isnan(rewards_G)
    rewards_K = rewards_G[scored_G]
    if len(rewards_K) < 2 or rewards_K.min() == rewards_K.max():
        return advantages_G
    mean = rewards_K.mean()
    centred_K = rewards_K - mean
    if scale in ("std", "population_std"):
        centred_K = centred_K / (rewards_K.std(ddof=int(scale == "std")) + epsilon)
    elif scale == "mean":
        centred_K = centred_K / mean if mean > 0 else np.zeros_like(centred_K)
    advantages_G[scored_G] = centred_K
    return advantages_G
