"""GRPO: group-relative policy optimisation, with a higher upper clip, a dual clip and a cap for those who want them.

    - min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)        r_t = exp(policy_t - old_t)

A: the group's normalised reward (services/reward/advantages/group.py). `old_logprobs: trainer` takes old_t from the trainer
before the update. With one update a batch that is policy_t itself: r_t is 1, nothing is clipped, and the correction alone acts
on staleness. `rollout` takes it from the engine: the clip keeps the policy near the one that sampled, staleness included.

Papers: GRPO, DeepSeekMath, arXiv 2402.03300 (clip 0.2, mean over each sequence); clip-higher, DAPO, arXiv 2503.14476; dual clip,
arXiv 1912.09729 (verl and SkyRL: 3); `delta`, two-sided clipping, INTELLECT-2, arXiv 2505.07291 (TRL, off).
Defaults: clip 0.2 / 0.28, token mean, weights truncated at 2.
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.reductions import Tokens
from services.trainer.algorithms.terms import Term, clip, token_ratio


def grpo(
    tokens: Tokens,
    old_N: torch.Tensor,
    /,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> Term:
    """The loss of each token."""
    return clip(tokens, token_ratio(tokens, old_N), clip_low, clip_high, dual_clip=dual_clip, delta=delta)
