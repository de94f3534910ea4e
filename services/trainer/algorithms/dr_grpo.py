"""Dr.GRPO: GRPO without the two biases of its normalisation.

    - min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),   A = R - mean of the group,   sum over tokens / constant length

Dividing by the group's deviation favours prompts that are nearly solved or nearly hopeless; dividing by a sequence's own length
favours short right answers and long wrong ones. Both are left out: the advantage is not scaled, and every sequence is divided by
the same length, sampling.max_new_tokens unless `max_tokens` says otherwise.

Paper: "Understanding R1-Zero-like training", arXiv 2503.20783. Defaults: clip 0.2 / 0.2, weights truncated at 2. TRL divides by
rows x max_completion_length too; slime drops only the deviation.
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.reductions import Tokens
from services.trainer.algorithms.terms import Term, clip, token_ratio


def dr_grpo(tokens: Tokens, old_N: torch.Tensor, /, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Term:
    """The loss of each token."""
    return clip(tokens, token_ratio(tokens, old_N), clip_low, clip_high)
