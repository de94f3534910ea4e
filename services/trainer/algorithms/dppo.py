"""DPPO: a trust region on probabilities instead of ratios, prime-rl's default loss.

    - k_t A_t r_t + penalty (log r_t)^2,   r_t = exp(policy_t - rollout_t),   sum over tokens / tokens of the update
    k_t = 0 where A_t > 0 and p_t - p_rollout > mask_high, or A_t < 0 and p_t - p_rollout < -mask_low; else 1

A rare token may change its ratio a lot without moving much probability; a frequent one may not. `one_sided: false` with 0.1
leaves out any token that moved too far, whatever its advantage (IPO). The penalty is never masked.

Papers: DPPO, arXiv 2602.04879 (binary total variation); the penalty, Kimi-K2.5, arXiv 2602.02276. Defaults as in prime-rl: masks
0.2 / 0.2, penalty 1e-3, old_logprobs rollout always.
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.reductions import Tokens
from services.trainer.algorithms.terms import Term, log_ratio


def dppo(
    tokens: Tokens,
    old_N: torch.Tensor,
    /,
    *,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    one_sided: bool = True,
    penalty: float = 1e-3,
) -> Term:
    """The loss of each token."""
    advantages_N = tokens.advantages_N
    gap_N = log_ratio(tokens, old_N)
    ratio_N = gap_N.exp()
    moved_N = (tokens.logprobs_N.exp() - old_N.exp()).detach()
    high_N, low_N = moved_N > mask_high, moved_N < -mask_low
    left_out_N = torch.where(advantages_N > 0, high_N, low_N) if one_sided else high_N | low_N
    loss_N = torch.where(left_out_N, 0.0, -advantages_N * ratio_N)
    return Term(loss_N, ratio_N, left_out_N & (advantages_N != 0), penalty_N=penalty * gap_N.square())
