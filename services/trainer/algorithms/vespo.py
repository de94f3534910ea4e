"""VESPO: variational sequence-level soft policy optimisation.

    - sg(phi(W)) A_t policy_t,   W = prod_t exp(policy_t - rollout_t),   phi(W) = exp(lambda + k log W - lambda W)

mean over all tokens of the update. phi is 1 at W = 1 with k and lambda chosen by the sign of A: a smooth weight on the whole
sequence's ratio, which falls off on both sides instead of a cut. log W lies in [log 1e-8, 20].

Paper: arXiv 2602.10693. Defaults: k 2 / 3, lambda 3 / 2 (advantage not negative / negative), as in TRL; old_logprobs rollout
always, so that W holds staleness and mismatch, and no further weight multiplies it. A token counts as held back where phi < 1/2.
"""

from __future__ import annotations

import math

import torch

from services.trainer.algorithms.reductions import LOG_RATIO_LIMIT, Tokens, per_sequence
from services.trainer.algorithms.terms import Term, log_ratio, token_ratio


def vespo(
    tokens: Tokens,
    old_N: torch.Tensor,
    /,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Term:
    """The loss of each token."""
    with torch.no_grad():
        log_w_S = per_sequence(log_ratio(tokens, old_N), tokens).clamp(math.log(1e-8), LOG_RATIO_LIMIT)
        log_w_N = log_w_S[tokens.sequence_N]
        negative_N = tokens.advantages_N < 0
        k_N = torch.full_like(log_w_N, k_pos).masked_fill(negative_N, k_neg)
        lambda_N = torch.full_like(log_w_N, lambda_pos).masked_fill(negative_N, lambda_neg)
        phi_N = (lambda_N + k_N * log_w_N - lambda_N * log_w_N.exp()).exp()
    loss_N = -phi_N * tokens.advantages_N * tokens.logprobs_N
    return Term(loss_N, token_ratio(tokens, old_N).detach(), phi_N < 0.5)
