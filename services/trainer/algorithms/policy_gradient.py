"""The frame of every policy loss: a term, weights, penalties, a reduction, and the metrics. Pure.

    loss = reduce( term_t * w_t + penalty_t + kl_t + divergence_t )

term: the algorithm's own file. w: corrections.py. kl: kl.py. divergence and the teacher's part of the advantage: distill.py.
The reduction gives a sum and a denominator that add up over micro-batches and ranks (reductions.py).

Metrics are logged for every algorithm: how far the engine's numbers are from the policy's (`mismatch_kl`, the k3 estimate of
KL(rollout || policy), `mismatch_abs`, `mismatch_max`), the ratio, the share held back and rejected, the mean weight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from services.trainer.algorithms.corrections import correction_weights
from services.trainer.algorithms.distill import divergence_penalty, with_teacher
from services.trainer.algorithms.kl import estimate, kl_penalty
from services.trainer.algorithms.reductions import Tokens, cleared, column, masked_sum, reduce
from services.trainer.algorithms.terms import Term
from shared.algorithms import OldLogprobs, PolicyOptions


def policy_gradient(
    tokens: Tokens, /, *, term: Callable[[Tokens, torch.Tensor], Term], options: PolicyOptions
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss sum, metric sums) of one micro-batch."""
    tokens, old_N = inputs(tokens, options)
    result = term(tokens, old_N)
    weight_N = correction_weights(tokens, old_N, options.correction)
    loss_N = result.loss_N * weight_N
    penalties = (result.penalty_N, kl_penalty(tokens, options.kl), divergence_penalty(tokens, options.distill))
    for penalty_N in penalties:
        if penalty_N is not None:
            loss_N = loss_N + penalty_N
    loss, denominator = reduce(loss_N, tokens, options.reduction, options.max_tokens)
    return loss, {"loss": loss.detach(), "denominator": denominator, **metrics(tokens, result, weight_N)}


def inputs(tokens: Tokens, options: PolicyOptions) -> tuple[Tokens, torch.Tensor]:
    """What a term sees: (tokens with zeros under the mask and the teacher in the advantages, old_N)."""
    tokens = with_teacher(cleared(tokens), options.distill)
    return tokens, old_logprobs(tokens, options.old_logprobs)


def old_logprobs(tokens: Tokens, how: OldLogprobs) -> torch.Tensor:
    """[N] the denominator of the ratio, without a gradient.

    interpolated: with a the token's age in updates, rollout + (a - 1) / a (policy - rollout), the policy one update back if
    the log-probability moved evenly; rollout itself for a <= 1 (AReaL's log-linear form).
    """
    if how == "rollout":
        return tokens.rollout_logprobs_N
    current_N = tokens.logprobs_N.detach()
    if how == "trainer":
        return current_N if tokens.old_logprobs_N is None else tokens.old_logprobs_N
    age_N = column(tokens, "age", "algorithm.old_logprobs: interpolated").to(current_N.dtype)
    share_N = (age_N - 1).clamp(min=0) / age_N.clamp(min=1)
    return tokens.rollout_logprobs_N + share_N * (current_N - tokens.rollout_logprobs_N)


@torch.no_grad()
def metrics(tokens: Tokens, result: Term, weight_N: torch.Tensor) -> dict[str, torch.Tensor]:
    """Metric sums; `reductions.finish` makes them readable."""
    mask_N, kind = tokens.mask_N, weight_N.dtype
    gap_N = (tokens.logprobs_N - tokens.rollout_logprobs_N).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    sums = {
        "tokens": mask_N.sum(),
        "ratio": masked_sum(result.ratio_N, mask_N),
        "ratio_max": _largest(result.ratio_N, mask_N),
        "clip_fraction": masked_sum(result.beyond_N.to(kind), mask_N),
        "tis_weight": masked_sum(weight_N, mask_N),
        "rejected": masked_sum((weight_N == 0).to(kind), mask_N),
        "mismatch_kl": masked_sum(estimate(-gap_N, "k3"), mask_N),
        "mismatch_abs": masked_sum(gap_N.abs(), mask_N),
        "mismatch_max": _largest(gap_N.abs(), mask_N),
    }
    if tokens.entropy_N is not None:
        sums["entropy"] = masked_sum(tokens.entropy_N, mask_N)
    for name, other in (("kl", "reference_logprobs"), ("teacher_kl", "teacher_logprobs")):
        if other in tokens.extras:
            sums[name] = masked_sum(estimate(tokens.logprobs_N - tokens.extras[other], "k3"), mask_N)
    return sums


def _largest(values_N: torch.Tensor, mask_N: torch.Tensor) -> torch.Tensor:
    return torch.where(mask_N, values_N, 0.0).max() if len(values_N) else values_N.sum()
