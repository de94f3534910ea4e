"""Supervised fine-tuning: the cross-entropy of demonstrated completions.

    loss = - sum_t logp_t        over the completion's tokens; the prompt's are not learnt

Checked against torch's cross_entropy by tests/trainer/test_losses.py.
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.reductions import Reduction, Tokens, cleared, masked_sum, reduce


def sft(
    tokens: Tokens, /, *, reduction: Reduction = "token_mean", max_tokens: int | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss sum, metric sums) of one micro-batch."""
    tokens = cleared(tokens)
    loss, denominator = reduce(-tokens.logprobs_N, tokens, reduction, max_tokens)
    metrics = {"loss": loss.detach(), "denominator": denominator, "tokens": tokens.mask_N.sum()}
    if tokens.entropy_N is not None:
        metrics["entropy"] = masked_sum(tokens.entropy_N, tokens.mask_N)
    return loss, metrics
