"""REINFORCE++, both variants: PPO's clip on advantages that are whitened over the whole update.

    - min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)

reinforce_pp           A_t = whiten(sum_{k >= t} gamma^(k - t) (R [last token] - beta kl_k)),  the KL inside the reward
reinforce_pp_baseline  A_t = whiten(R - mean of the group),  the KL (k2) as a term of the loss

The whitening needs every group of the update: the trainer does it before the first micro-batch (services/trainer/advantages.py).

Paper: arXiv 2501.03262. Defaults: clip 0.2 / 0.2, gamma 1, KL coefficient 0, weights truncated at 2. slime subtracts beta kl_t
from the baseline variant's advantage; verl multiplies the running return by the mask, which takes all credit from the turns
before the last one of a multi-turn sample. Here tokens that an environment wrote are skipped, and credit flows past them.
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.reductions import Tokens
from services.trainer.algorithms.terms import Term, clip, token_ratio


def reinforce_pp(tokens: Tokens, old_N: torch.Tensor, /, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Term:
    """The loss of each token, of both variants."""
    return clip(tokens, token_ratio(tokens, old_N), clip_low, clip_high)
