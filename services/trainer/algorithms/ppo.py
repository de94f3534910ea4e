"""PPO with a critic: the policy's term, and the critic's loss.

    policy   - min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),   A = whiten(GAE)
    critic   1/2 max((V_t - G_t)^2, (clip(V_t, V_old - value_clip, V_old + value_clip) - G_t)^2),   G = GAE + V_old

GAE, the returns G and the whitening are made before the first micro-batch (services/trainer/advantages.py) from the column
`values`, the critic's values before the update. The value of a token is that of the state it is drawn in.

Papers: PPO, arXiv 1707.06347; GAE, arXiv 1506.02438; dual clip, arXiv 1912.09729. Defaults: clip 0.2 / 0.2, value clip 0.2,
gamma = lam = 1, whitened, as in slime, verl and AReaL; verl and SkyRL have the dual clip on at 3.
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.reductions import Reduction, Tokens, cleared, column, masked_sum, reduce
from services.trainer.algorithms.terms import Term, clip, token_ratio


def ppo(
    tokens: Tokens,
    old_N: torch.Tensor,
    /,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Term:
    """The policy's loss of each token."""
    return clip(tokens, token_ratio(tokens, old_N), clip_low, clip_high, dual_clip=dual_clip)


def critic(
    tokens: Tokens,
    /,
    *,
    value_clip: float | None = 0.2,
    reduction: Reduction = "token_mean",
    max_tokens: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss sum, metric sums) of the critic. Its output for each token stands where a policy's log-probability does."""
    tokens = cleared(tokens)
    values_N, returns_N = tokens.logprobs_N, column(tokens, "returns", "the critic's loss")
    error_N = (values_N - returns_N).square()
    held_N = torch.zeros_like(tokens.mask_N)
    if value_clip is not None:
        old_N = column(tokens, "values", "the critic's loss")
        near_N = old_N + (values_N - old_N).clamp(-value_clip, value_clip)
        clipped_N = (near_N - returns_N).square()
        error_N, held_N = torch.maximum(error_N, clipped_N), clipped_N > error_N
    loss, denominator = reduce(error_N / 2, tokens, reduction, max_tokens)
    with torch.no_grad():
        metrics = {
            "loss": loss.detach(),
            "denominator": denominator,
            "tokens": tokens.mask_N.sum(),
            "value": masked_sum(values_N, tokens.mask_N),
            "return": masked_sum(returns_N, tokens.mask_N),
            "value_error": masked_sum((values_N - returns_N).square(), tokens.mask_N),
            "value_clip_fraction": masked_sum(held_N.to(values_N.dtype), tokens.mask_N),
        }
    return loss, metrics
