"""DAPO: decoupled clip and dynamic sampling.

    - min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),   mean over all tokens of the update

Four parts: clip-higher (here), the token mean (reduction), dynamic sampling (reward.filters: zero_variance drops groups that
teach nothing, and the controller issues others in their place), and overlong shaping (overlong_penalty, taken from the reward).

Paper: arXiv 2503.14476. Defaults: clip 0.2 / 0.28, weights truncated at 2, shaping off; the paper's buffer is 4096 of 20480
tokens with a penalty of 1. verl gives up after 10 batches without enough groups; here nothing does, and each drop is counted.
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.reductions import Tokens
from services.trainer.algorithms.terms import Term, clip, token_ratio


def dapo(tokens: Tokens, old_N: torch.Tensor, /, *, clip_low: float = 0.2, clip_high: float = 0.28) -> Term:
    """The loss of each token."""
    return clip(tokens, token_ratio(tokens, old_N), clip_low, clip_high)
