"""One pass of micro-batches through Megatron's schedule: what goes in, the loss at the end, and what is reported.

N trained tokens of a micro-batch, R of them predicted from on this context-parallel rank, K ids asked for a token.

A loss sees all N tokens on every rank that computes it. A loss that is not finite is noted in `problem` and raised after the
schedule, never in the middle of it: the other pipeline stages wait for this one's gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from services.trainer.algorithms.reductions import Loss, Tokens
from services.trainer.batches import PackedBatch
from services.trainer.layout import Layout
from services.trainer.megatron.inputs import Inputs, common_length, model_inputs

TOP_IDS = "teacher_top_ids"
"""The column whose ids the policy scores beside the sampled ones."""


class NonFiniteError(ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a forward pass says about a micro-batch's N trained tokens."""

    logprobs_N: torch.Tensor
    """A critic's values."""
    entropy_N: torch.Tensor
    top_ids_NK: torch.Tensor
    """The likeliest tokens, the likeliest first, as many as were asked for."""
    top_logprobs_NK: torch.Tensor


@dataclass(slots=True)
class Step:
    """The micro-batches of one call and what came of them."""

    batches: list[PackedBatch]
    temperature: float
    loss: Loss | None
    """None: only score."""
    top: int
    layout: Layout
    device: torch.device
    bounds: bool
    metrics: list[dict[str, float]] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)
    problem: str = ""
    length: int = field(init=False)
    """Tokens of each micro-batch, where all must be alike."""

    def __post_init__(self) -> None:
        self.length = common_length(self.batches, self.layout)

    def forward(self, batches: Iterator[PackedBatch], chunk: torch.nn.Module) -> tuple[Any, Any]:
        """Megatron's forward_step_func."""
        batch = next(batches)
        rank = parallel_state.get_context_parallel_rank()
        inputs = model_inputs(batch, self.layout, rank, self.device, bounds=self.bounds, at_least=self.length)
        ids_RK = inputs.targets_R[:, None]
        if self.loss is not None and TOP_IDS in batch.extras:
            asked_NK = self._tensor(batch.extras[TOP_IDS]).long()
            ids_RK = torch.cat([ids_RK, asked_NK if inputs.where_R is None else asked_NK[inputs.where_R]], 1)
        output = chunk(
            ids_M=inputs.ids_M,
            positions_M=inputs.positions_M,
            layout=inputs.layout,
            rows_R=inputs.rows_R,
            ids_RK=ids_RK,
            temperature=self.temperature,
            top=self.top,
        )

        def finish(output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
            whole = _all_tokens(output, inputs, len(batch.targets_N))
            if self.loss is not None:
                return self._finish(batch, whole)
            self.scores.append(Scores(whole[0][:, 0], whole[1], whole[2], whole[0][:, 1:]))
            return whole[1].sum(), self._none, {}

        return output, finish

    def _finish(
        self, batch: PackedBatch, output: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        """(loss, Megatron's token count, which stays 0, nothing for Megatron to collect)."""
        logprobs_NK, entropy_N, _ = output
        if not batch.group_ids:  # a filler that keeps replicas in step
            return logprobs_NK.sum() * 0.0, self._none, {}
        assert self.loss is not None
        total, metrics = self.loss(tokens_of(batch, logprobs_NK, entropy_N))
        names = list(metrics)
        values = torch.stack([total.detach().double(), *(metrics[name].detach().double() for name in names)]).tolist()
        if not math.isfinite(values[0]):
            self.problem = self.problem or nonfinite_loss(batch, logprobs_NK[:, 0])
        self.metrics.append(
            {
                **dict(zip(names, values[1:], strict=True)),
                "sequences": float(len(batch.lengths_S)),
                "nonfinite_logprobs": float(batch.nonfinite),
            }
        )
        return total, self._none, {}

    @property
    def _none(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.int, device=self.device)

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.require(array, requirements="W")).to(self.device)


def tokens_of(batch: PackedBatch, logprobs_NK: torch.Tensor, entropy_N: torch.Tensor) -> Tokens:
    """What a loss sees of the micro-batch. Log-probabilities after the first column are those of the column `TOP_IDS`."""

    def tensor(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.require(array, requirements="W")).to(logprobs_NK.device)

    extras = {name: tensor(column) for name, column in batch.extras.items()}
    if logprobs_NK.size(1) > 1:
        extras["student_top_logprobs"] = logprobs_NK[:, 1:]
    return Tokens(
        logprobs_N=logprobs_NK[:, 0],
        rollout_logprobs_N=tensor(batch.rollout_logprobs_N),
        advantages_N=tensor(batch.advantages_N),
        mask_N=tensor(batch.mask_N),
        sequence_N=tensor(batch.sequence_N),
        sequences=len(batch.lengths_S),
        entropy_N=entropy_N,
        extras=extras,
    )


class _FromRanks(torch.autograd.Function):
    """[R, ...] of this rank -> [N, ...] of all context-parallel ranks. Each computes the whole loss and gets its part back."""

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, where_R: torch.Tensor, count: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(where_R)
        whole = values.new_zeros(count, *values.shape[1:])
        whole[where_R] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[override]
        (where_R,) = ctx.saved_tensors
        return gradient[where_R], None, None, None


def _all_tokens(output: tuple[torch.Tensor, ...], inputs: Inputs, count: int) -> tuple[torch.Tensor, ...]:
    if inputs.where_R is None:
        return output
    group = parallel_state.get_context_parallel_group()
    return tuple(_FromRanks.apply(values, inputs.where_R, count, group) for values in output)


def nonfinite_loss(batch: PackedBatch, logprobs_N: torch.Tensor) -> str:
    finite = int(torch.isfinite(logprobs_N).sum())
    advantages = batch.advantages_N
    groups = ", ".join(dict.fromkeys(batch.group_ids))
    return (
        f"the loss is not finite in a micro-batch of groups {groups[:300]}: {finite} of {len(logprobs_N)} log-probabilities are "
        f"finite, advantages lie in [{advantages.min(initial=0)}, {advantages.max(initial=0)}]; no weight was changed. If the "
        "log-probabilities are not finite the weights have diverged: go back to an earlier checkpoint with a lower learning rate"
    )


def nonfinite_gradient(norm: float) -> NonFiniteError:
    return NonFiniteError(
        f"the gradient's norm is {norm}: no weight was changed; lower the learning rate or check the advantages"
    )
