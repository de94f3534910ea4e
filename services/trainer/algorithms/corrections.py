"""Off-policy corrections: constant weights on the policy term, for any loss. Pure.

    w = exp(old - rollout)

of a token, or of the sum over a sequence: for an engine that computes other numbers than the trainer, and, with the trainer's
own log-probabilities as `old`, for weights that are some updates old.

token_truncate     min(max(w, low), high)          TIS, Yao et al. 2025, "Your efficient RL framework secretly brings you
                                                   off-policy RL training" (high 2 in most systems)
token_mask         w inside [low, high], else 0    IcePop, Ring-1T, arXiv 2510.18855 (0.5, 5)
sequence_truncate  the same with the sequence's w  (SkyRL: 5)
sequence_mask                                      (TRL's default, with 3)
geometric          0 for a sequence whose exp(mean(old - rollout)) is outside the bounds (SkyRL: 0.99, 1.01)
outlier            0 for a sequence with one token outside the bounds (SkyRL: 1e-4, 100)
opsm               0 where A < 0 and mean(rollout - policy) of the sequence > opsm: DeepSeek-V3.2, arXiv 2512.02556

What is left out stays in the denominator, so that rejected tokens do not make the rest weigh more. A token without a finite
log-probability from the engine has its mask unset long before (services/trainer/batches.py) and counts nowhere; should a loss
be called with one, it counts as w = 1. Masks and weights carry no gradient.

Checked by tests/trainer/test_loss_oracle.py (weights of the archive) and tests/trainer/test_loss_terms.py.
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.reductions import LOG_RATIO_LIMIT, Tokens, per_sequence, sequence_mean
from shared.algorithms import CorrectionConfig


@torch.no_grad()
def correction_weights(tokens: Tokens, old_N: torch.Tensor, options: CorrectionConfig) -> torch.Tensor:
    """[N] what multiplies the policy term."""
    gap_N = (old_N - tokens.rollout_logprobs_N).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    weight_N = _importance(gap_N, tokens, options)
    if options.geometric is not None:
        mean_S = sequence_mean(gap_N, tokens).exp()
        weight_N = weight_N * _inside(mean_S, *options.geometric)[tokens.sequence_N]
    if options.outlier is not None:
        outside_N = ~_inside(gap_N.exp(), *options.outlier)
        weight_N = weight_N * (per_sequence(outside_N.to(gap_N.dtype), tokens) == 0)[tokens.sequence_N]
    if options.opsm is not None:
        moved_S = sequence_mean(tokens.rollout_logprobs_N - tokens.logprobs_N, tokens)
        weight_N = weight_N * ~((tokens.advantages_N < 0) & (moved_S > options.opsm)[tokens.sequence_N])
    return weight_N


def _importance(gap_N: torch.Tensor, tokens: Tokens, options: CorrectionConfig) -> torch.Tensor:
    if options.mode == "none":
        return torch.ones_like(gap_N)
    if options.mode.startswith("sequence"):
        gap_N = per_sequence(gap_N, tokens)[tokens.sequence_N]
    weight_N = gap_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if options.mode.endswith("truncate"):
        return weight_N.clamp(options.low, options.high)
    return weight_N * _inside(weight_N, options.low, options.high)


def _inside(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (values >= low) & (values <= high)
