"""RLOO's advantage: the reward minus the mean of the group's other rewards.

    A_i = R_i - mean_{j != i} R_j = K / (K - 1) (R_i - mean)        K scored samples

Papers: Kool et al. 2019; Ahmadian et al., arXiv 2402.14740. TRL reads a missing score as 0; here it is left out of K.
"""

from __future__ import annotations

import numpy as np


def leave_one_out(rewards_G: np.ndarray) -> np.ndarray:
    """[G]"""
    scored_G = ~np.isnan(rewards_G)
    count = int(scored_G.sum())
    if count < 2 or np.nanmin(rewards_G) == np.nanmax(rewards_G):
        return np.zeros(len(rewards_G))
    return np.where(scored_G, (rewards_G - np.nanmean(rewards_G)) * count / (count - 1), 0.0)
