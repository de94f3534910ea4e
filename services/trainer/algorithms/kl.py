"""Estimates of KL(policy || reference) from the sampled token. Pure, differentiable.

With d = log policy - log reference:

    k1       d                    unbiased, may be negative; as a loss its gradient is zero in expectation
    k2       d^2 / 2              biased value, gradient of the KL when on policy
    k3       exp(-d) - 1 + d      unbiased, never negative; its gradient is that of the reversed KL
    low_var  k3 clamped to [-10, 10], d clamped to [-20, 20]
    abs      |d|

Schulman 2020, "Approximating KL divergence". `unbiased` multiplies the estimate by policy / rollout, gradient included, which
makes the gradient that of KL(policy || reference) for samples of any age (DeepSeek-V3.2, arXiv 2512.02556).

Defaults elsewhere: TRL k3, unbiased, coefficient 0; verl low_var 1e-3, off; SkyRL k3 1e-3; slime and Relax k1, 0.
Checked against independent numbers by tests/trainer/test_loss_oracle.py.
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.reductions import LOG_RATIO_LIMIT, Tokens, column
from services.trainer.algorithms.terms import token_ratio
from shared.algorithms import KlConfig


def estimate(gap: torch.Tensor, estimator: str) -> torch.Tensor:
    """The estimate for each d = log policy - log reference."""
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return gap.square() / 2
    if estimator == "abs":
        return gap.abs()
    gap = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = (-gap).exp() - 1 + gap
    return k3.clamp(-10.0, 10.0) if estimator == "low_var" else k3


def kl_penalty(tokens: Tokens, options: KlConfig) -> torch.Tensor | None:
    """[N] what the loss adds, or None where the loss has no such term."""
    if options.coef == 0 or options.use == "reward":
        return None
    reference_N = column(tokens, "reference_logprobs", "algorithm.kl")
    penalty_N = options.coef * estimate(tokens.logprobs_N - reference_N, options.estimator)
    return penalty_N * token_ratio(tokens, tokens.rollout_logprobs_N) if options.unbiased else penalty_N
