"""What the policy losses are made of: the ratio, of a token or of a sequence, and the clip. Pure.

A *term* is a function of (tokens, old_N) that gives the loss of each token before weights, penalties and the reduction. It may
rely on zeros wherever the mask is unset (`reductions.cleared`), so it needs no masks of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from services.trainer.algorithms.reductions import LOG_RATIO_LIMIT, Tokens, ratio, sequence_mean


@dataclass(frozen=True, slots=True)
class Term:
    """The loss of each token, and what the metrics need."""

    loss_N: torch.Tensor
    """To be minimised. Correction weights multiply it."""
    ratio_N: torch.Tensor
    """policy / old, as the algorithm takes it."""
    beyond_N: torch.Tensor
    """Bool: the algorithm holds the token back (no gradient, or a capped weight)."""
    penalty_N: torch.Tensor | None = None
    """Added to the loss; no weight multiplies it."""


def log_ratio(tokens: Tokens, old_N: torch.Tensor) -> torch.Tensor:
    """[N] log(policy / old), differentiable and bounded."""
    return (tokens.logprobs_N - old_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_ratio(tokens: Tokens, old_N: torch.Tensor) -> torch.Tensor:
    """[N] policy / old."""
    return ratio(tokens.logprobs_N, old_N)


def sequence_ratio(
    tokens: Tokens, old_N: torch.Tensor, form: Literal["sequence", "token"] = "sequence"
) -> torch.Tensor:
    """[N] the geometric mean of the sequence's ratios, at each of its tokens.

    sequence: the gradient is that of the mean. token: the same value, but the gradient at a token flows to its own
    log-probability alone. Summed over a sequence they agree as long as advantages and weights are the same for all its tokens.
    """
    if form == "sequence":
        return sequence_mean(log_ratio(tokens, old_N), tokens).exp()[tokens.sequence_N]
    mean_S = sequence_mean(log_ratio(tokens, old_N).detach(), tokens)
    own_N = tokens.logprobs_N - tokens.logprobs_N.detach()
    return (mean_S[tokens.sequence_N] + own_N).exp()


def clip(
    tokens: Tokens,
    ratio_N: torch.Tensor,
    clip_low: float,
    clip_high: float,
    *,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> Term:
    """PPO's clipped surrogate.

        - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    delta: the first r is at most delta. dual_clip: where A < 0 the loss is at most -dual_clip A.
    """
    advantages_N = tokens.advantages_N
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    free_N = ratio_N if delta is None else ratio_N.clamp(max=delta)
    loss_N = -torch.minimum(free_N * advantages_N, clipped_N * advantages_N)
    high_N = (ratio_N > 1 + clip_high) & (advantages_N > 0)
    low_N = (ratio_N < 1 - clip_low) & (advantages_N < 0)
    if dual_clip is not None:
        loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, -dual_clip * advantages_N), loss_N)
        low_N |= (ratio_N > dual_clip) & (advantages_N < 0)
    return Term(loss_N, ratio_N, high_N | low_N)
