"""What a loss sees, the one masked reduction that every loss uses, and how metrics of micro-batches add up.

N completion tokens of a packed micro-batch, S sequences in it. The tokens of a sequence are neighbours, in order.

A loss returns a sum, never a mean: gradients are added up over micro-batches as they arrive and divided once, by the sum of
the `denominator` metrics over all micro-batches and ranks. So the split into micro-batches or over ranks changes nothing
(tests/trainer/test_loss_properties.py), and an update is a true mean over its own tokens however long they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from shared.algorithms import Reduction


@dataclass(frozen=True, slots=True)
class Tokens:
    """The completion tokens of a micro-batch. `logprobs_N` carries the gradient, and so does the extra `student_top_logprobs`."""

    logprobs_N: torch.Tensor
    """Log-probability of each token under the policy being trained, at the sampling temperature."""
    rollout_logprobs_N: torch.Tensor
    """The engine's, when it drew the token. Always finite: zero where the engine gave none, and there the mask is unset."""
    advantages_N: torch.Tensor
    mask_N: torch.Tensor
    """Bool: the token counts. Tokens that an environment wrote are not listed at all; unset here means that the engine, or a
    stage that added a column, gave no finite number."""
    sequence_N: torch.Tensor
    """Which of the S sequences the token belongs to, ascending."""
    sequences: int
    """S."""
    old_logprobs_N: torch.Tensor | None = None
    """The trainer's own before the first update on this batch; None: this is the first, so they are `logprobs_N`."""
    entropy_N: torch.Tensor | None = None
    """Of the policy's distribution at each token, without a gradient."""
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Columns that a pipeline stage added, such as reference or teacher log-probabilities: see services/trainer/samples.py."""


class Loss(Protocol):
    """A loss: pure, from tokens to (sum to be minimised, metrics). See `finish` for the rules of metrics."""

    def __call__(self, tokens: Tokens, /) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


LOG_RATIO_LIMIT = 20.0
"""Beyond this the exponential would run out of float32 and turn gradients into NaN; every clip has acted long before."""


def ratio(logprobs_N: torch.Tensor, old_N: torch.Tensor) -> torch.Tensor:
    """exp(logprobs - old): how much likelier each token has become."""
    return (logprobs_N - old_N).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


class MissingColumn(ValueError):
    """A loss needs a column that no stage has added."""


def column(tokens: Tokens, name: str, needed_by: str) -> torch.Tensor:
    """An extra column, or MissingColumn. Nothing is ever put in its place."""
    if name not in tokens.extras:
        raise MissingColumn(
            f"{needed_by} needs the column {name!r}, but the batch has {sorted(tokens.extras) or 'none'}"
        )
    return tokens.extras[name]


def cleared(tokens: Tokens) -> Tokens:
    """The same with zeros wherever the mask is unset, so that nothing there can reach a loss or a gradient, NaN included."""
    mask_N = tokens.mask_N

    def clear(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_N.view(-1, *[1] * (values.dim() - 1)), values, torch.zeros_like(values))

    return replace(
        tokens,
        logprobs_N=clear(tokens.logprobs_N),
        rollout_logprobs_N=clear(tokens.rollout_logprobs_N),
        advantages_N=clear(tokens.advantages_N),
        old_logprobs_N=None if tokens.old_logprobs_N is None else clear(tokens.old_logprobs_N),
        extras={name: clear(values) for name, values in tokens.extras.items()},
    )


def masked_sum(values_N: torch.Tensor, mask_N: torch.Tensor) -> torch.Tensor:
    """Sum over the mask. `where` and not a product, so that a masked NaN or infinity stays out."""
    return torch.where(mask_N, values_N, 0.0).sum()


def per_sequence(values_N: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """[S] masked sums of each sequence."""
    kept_N = torch.where(tokens.mask_N, values_N, 0.0)
    return kept_N.new_zeros(tokens.sequences).index_add(0, tokens.sequence_N, kept_N)


def sequence_mean(values_N: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """[S] masked mean of each sequence; 0 for one without tokens."""
    return per_sequence(values_N, tokens) / per_sequence(torch.ones_like(values_N), tokens).clamp(min=1)


def reduce(
    values_N: torch.Tensor, tokens: Tokens, how: Reduction = "token_mean", max_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, denominator) over the mask; adding up both over micro-batches and dividing gives the mean.

    token_mean: every token weighs the same (DAPO). sequence_mean: every sequence weighs the same, its tokens share that
    (GRPO's paper). sequence_sum: every token weighs the same, over the number of sequences (LUSPO). constant: the sum over a
    constant length of `max_tokens` a sequence (Dr.GRPO). A sequence without tokens counts as zero in the latter three; one
    whose tokens are all masked leaves the denominator.
    """
    if how == "token_mean":
        return masked_sum(values_N, tokens.mask_N), tokens.mask_N.sum()
    kept_S = per_sequence(torch.ones_like(values_N), tokens)
    listed_S = torch.bincount(tokens.sequence_N, minlength=tokens.sequences)
    sequences = tokens.sequences - ((listed_S > 0) & (kept_S == 0)).sum()
    if how == "sequence_mean":
        return (per_sequence(values_N, tokens) / kept_S.clamp(min=1)).sum(), sequences
    if how == "sequence_sum":
        return masked_sum(values_N, tokens.mask_N), sequences
    if max_tokens is None:
        raise ValueError("reduction 'constant' needs max_tokens, the length that every sequence is divided by")
    return masked_sum(values_N, tokens.mask_N), sequences * max_tokens


COUNTS = frozenset({"denominator", "tokens", "sequences", "nonfinite_logprobs"})


def merge(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several micro-batches or ranks as one: `*_max` by maximum, all others by sum."""
    merged: dict[str, float] = {}
    for part in metrics:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            else:
                merged[name] = max(merged[name], value) if name.endswith("_max") else merged[name] + value
    return merged


def finish(sums: Mapping[str, float]) -> dict[str, float]:
    """Summed metrics -> readable ones: `loss` over `denominator`, counts and `*_max` as they are, all else over `tokens`."""

    def value(name: str) -> float:
        if name in COUNTS or name.endswith("_max"):
            return sums[name]
        divisor = sums["denominator"] if name == "loss" else sums["tokens"]
        return sums[name] / divisor if divisor else 0.0

    return {name: value(name) for name in sums}
