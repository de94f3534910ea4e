"""Decoupled PPO: one policy to stay near to, another that sampled.

    - w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
    r_t = exp(policy_t - recent_t)        the clip: near a recent policy
    w_t = exp(recent_t - rollout_t)       constant: from there to the one that sampled; 0 above 5

`old_logprobs: interpolated` estimates the recent policy, one update back, between the engine's log-probability and today's by the
token's age. `trainer` takes the policy before the update itself: then r_t is 1 with one update a batch, and only w_t acts.

Paper: AReaL, arXiv 2505.24298. Defaults: clip 0.2 / 0.2, weights above 5 masked, as in AReaL; tokens left out stay in the
denominator. AReaL's default recomputes the recent policy at the cost of a forward pass; its `loglinear` is the default here.
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.reductions import Tokens
from services.trainer.algorithms.terms import Term, clip, token_ratio


def decoupled_ppo(
    tokens: Tokens,
    old_N: torch.Tensor,
    /,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Term:
    """The loss of each token; w is the correction's."""
    return clip(tokens, token_ratio(tokens, old_N), clip_low, clip_high, dual_clip=dual_clip)
