"""GRPO with a higher upper clip and truncated importance correction.

    loss = - sum_t w_t * min(r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t)

    r_t = exp(logp_t - old_t)               policy ratio, carries the gradient
    w_t = min(exp(old_t - rollout_t), cap)  constant: corrects for an engine that computes other numbers than the trainer,
                                            and for weights that are some steps old

`old_logprobs: trainer` takes old_t from the trainer before the update. With one update a batch that is logp_t itself, so
r_t is 1, nothing is clipped, and w_t alone corrects for staleness. `rollout` takes old_t from the engine: w_t is 1, and the
clip keeps the policy near the one that sampled (PPO's rule, with staleness inside the ratio).

Papers: GRPO, arXiv 2402.03300; clip-higher and the token mean, DAPO, arXiv 2503.14476; truncated importance sampling, Yao et
al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". The mismatch metric is the k3 estimate of
KL(rollout || policy), Schulman 2020.

Checked against independent numbers to 1e-9, gradients included, by tests/trainer/test_losses.py.
"""

from __future__ import annotations

from typing import Literal

import torch

from services.trainer.algorithms.reductions import Reduction, Tokens, masked_sum, ratio, reduce


def grpo(
    tokens: Tokens,
    /,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    old_logprobs: Literal["trainer", "rollout"] = "trainer",
    tis_cap: float | None = 2.0,
    reduction: Reduction = "token_mean",
    max_tokens: int | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss sum, metric sums) of one micro-batch."""
    logprobs_N, rollout_N, advantages_N = tokens.logprobs_N, tokens.rollout_logprobs_N, tokens.advantages_N
    if old_logprobs == "rollout":
        old_N = rollout_N
    else:
        old_N = logprobs_N.detach() if tokens.old_logprobs_N is None else tokens.old_logprobs_N
    ratio_N = ratio(logprobs_N, old_N)
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    surrogate_N = torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
    weight_N = torch.ones_like(old_N)
    if tis_cap is not None:
        weight_N = ratio(old_N, rollout_N).clamp(max=tis_cap)
    loss, denominator = reduce(-surrogate_N * weight_N, tokens, reduction, max_tokens)
    with torch.no_grad():
        beyond_N = ((ratio_N > 1 + clip_high) & (advantages_N > 0)) | ((ratio_N < 1 - clip_low) & (advantages_N < 0))
        gap_N = rollout_N - logprobs_N
        metrics = {
            "loss": loss.detach(),
            "denominator": denominator,
            "tokens": tokens.mask_N.sum(),
            "ratio": masked_sum(ratio_N, tokens.mask_N),
            "ratio_max": torch.where(tokens.mask_N, ratio_N, 0.0).max() if len(ratio_N) else ratio_N.sum(),
            "clip_fraction": masked_sum(beyond_N.to(ratio_N.dtype), tokens.mask_N),
            "tis_weight": masked_sum(weight_N, tokens.mask_N),
            "mismatch_kl": masked_sum(ratio(logprobs_N, rollout_N) - 1 + gap_N, tokens.mask_N),
        }
        if tokens.entropy_N is not None:
            metrics["entropy"] = masked_sum(tokens.entropy_N, tokens.mask_N)
    return loss, metrics
