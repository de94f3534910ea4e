"""Log-probabilities and entropy from hidden states, without the logits of all tokens, and with the vocabulary cut over ranks.

N tokens, C of them at a time, H hidden size, V vocabulary of this rank, K ids asked for a token.

The product with the output weight, the softmax and the choice of a few ids are one operation. It holds the logits of C tokens at
a time in float32 and computes them once more for the gradient; if all of them fit into `LOGIT_ELEMENTS` it keeps them instead.
Between ranks only numbers a token travel, twice a micro-batch. tests/trainer/test_scoring.py compares with torch's log_softmax;
benchmarks/trainer.py measures the peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

LOGIT_ELEMENTS = 1 << 24
"""Logits held at once: 64 MiB in float32."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The part of the vocabulary whose logits this rank has."""

    first: int = 0
    group: dist.ProcessGroup | None = None
    """The ranks that have the other parts; None: there are none."""

    def reduce(self, values: torch.Tensor, operation: Any) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(values, op=operation, group=self.group)
        return values


def score_tokens(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    ids_NK: torch.Tensor,
    temperature: float,
    vocabulary: Vocabulary | None = None,
    elements: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of each id [N, K], entropy [N]) under softmax(hidden @ weight / temperature), in float32.

    The entropy carries no gradient. The gradient for `hidden_NH` is this rank's part: sum it over the ranks.
    """
    return _Score.apply(
        hidden_NH, weight_VH, ids_NK, temperature, vocabulary or Vocabulary(), elements or LOGIT_ELEMENTS
    )


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        ids_NK: torch.Tensor,
        temperature: float,
        vocabulary: Vocabulary,
        elements: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        local_NK, here_NK = _local(ids_NK, vocabulary.first, len(weight_VH))
        rows = max(1, elements // len(weight_VH))
        count = len(hidden_NH)
        highest_N = hidden_NH.new_empty(count, dtype=torch.float32)
        sums_N2 = hidden_NH.new_empty(count, 2, dtype=torch.float32)
        chosen_NK = hidden_NH.new_empty(ids_NK.shape, dtype=torch.float32)
        kept_NV = None
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            logits_CV = _logits(hidden_NH[part], weight_VH, temperature)
            highest_N[part] = logits_CV.amax(-1)
            logits_CV -= highest_N[part, None]
            chosen_NK[part] = logits_CV.gather(1, local_NK[part])
            weights_CV = logits_CV.exp()
            sums_N2[part, 0] = weights_CV.sum(-1)
            sums_N2[part, 1] = logits_CV.mul_(weights_CV).sum(-1)
            if count <= rows and any(ctx.needs_input_grad):
                kept_NV = weights_CV
        top_N = vocabulary.reduce(highest_N.clone(), dist.ReduceOp.MAX)
        below_N = highest_N - top_N
        # Sums were taken relative to this rank's highest logit; here they become relative to the highest of all.
        shift_N = below_N.exp()
        sums_N2[:, 1] = shift_N * (sums_N2[:, 1] + below_N * sums_N2[:, 0])
        sums_N2[:, 0] *= shift_N
        chosen_NK = torch.where(here_NK, chosen_NK + below_N[:, None], 0.0)
        total = vocabulary.reduce(torch.cat([sums_N2, chosen_NK], 1), dist.ReduceOp.SUM)
        log_total_N = total[:, 0].log()
        ctx.save_for_backward(hidden_NH, weight_VH, local_NK, here_NK, top_N + log_total_N)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.kept_NV, ctx.shift_N = kept_NV, (below_N - log_total_N).exp()
        entropy_N = log_total_N - total[:, 1] / total[:, 0]
        ctx.mark_non_differentiable(entropy_N)
        return total[:, 2:] - log_total_N[:, None], entropy_N

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient_NK: torch.Tensor, _entropy: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None, None]:
        hidden_NH, weight_VH, local_NK, here_NK, log_total_N = ctx.saved_tensors
        gradient_NK = gradient_NK / ctx.temperature
        inside_NK = torch.where(here_NK, gradient_NK, 0.0)
        all_N = gradient_NK.sum(-1)
        hidden_gradient = torch.empty_like(hidden_NH)
        several = len(hidden_NH) > ctx.rows
        weight_gradient = torch.zeros_like(weight_VH, dtype=torch.float32 if several else weight_VH.dtype)
        for start in range(0, len(hidden_NH), ctx.rows):
            part = slice(start, start + ctx.rows)
            if ctx.kept_NV is not None:
                logits_CV, ctx.kept_NV = ctx.kept_NV, None
                logits_CV *= -(all_N * ctx.shift_N)[:, None]
            else:
                logits_CV = _logits(hidden_NH[part], weight_VH, ctx.temperature)
                logits_CV.sub_(log_total_N[part, None]).exp_().mul_(-all_N[part, None])
            logits_CV.scatter_add_(1, local_NK[part], inside_NK[part])
            logits_CV = logits_CV.to(weight_VH.dtype)
            torch.mm(logits_CV, weight_VH, out=hidden_gradient[part])
            weight_gradient += logits_CV.t() @ hidden_NH[part]
        return hidden_gradient, weight_gradient.to(weight_VH.dtype), None, None, None, None


def _logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, temperature: float) -> torch.Tensor:
    logits_CV = (hidden_CH @ weight_VH.t()).float()
    return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)


def _local(ids_NK: torch.Tensor, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row of each id in this rank's part, or some row of it; whether it is there)."""
    local_NK = ids_NK - first
    return local_NK.clamp(0, size - 1), (local_NK >= 0) & (local_NK < size)


@torch.no_grad()
def likeliest(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    count: int,
    temperature: float,
    vocabulary: Vocabulary | None = None,
    elements: int | None = None,
) -> torch.Tensor:
    """[N, count] ids of the likeliest tokens, the likeliest first."""
    vocabulary = vocabulary or Vocabulary()
    rows = max(1, (elements or LOGIT_ELEMENTS) // len(weight_VH))
    values, ids = [], []
    for hidden_CH in hidden_NH.split(rows):
        found = _logits(hidden_CH, weight_VH, temperature).topk(min(count, len(weight_VH)), dim=-1)
        values.append(found.values)
        ids.append(found.indices + vocabulary.first)
    best_NK, ids_NK = torch.cat(values), torch.cat(ids)
    if vocabulary.group is not None:
        missing = (0, count - best_NK.size(1))  # parts of the vocabulary may differ in size
        best_NK, ids_NK = F.pad(best_NK, missing, value=-torch.inf), F.pad(ids_NK, missing)
        best_NK, ids_NK = (_gather_last(x, vocabulary.group) for x in (best_NK, ids_NK))
    return ids_NK.gather(1, best_NK.topk(count, dim=-1).indices)


def _gather_last(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, -1)
