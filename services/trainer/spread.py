"""Micro-batches for all replicas of the policy at once: balanced by cost, and given out while groups still arrive. Pure.

A spread is what the ranks work on in one call: for each data-parallel replica some micro-batches under the token budget. With one
replica and one pipeline stage a spread is one micro-batch, filled in the order of arrival (batches.Packer). Otherwise samples are
collected until every replica can be given enough, then shared out so that the costliest replica has as little as possible, for
the others wait for it. The result depends on the samples, their order, the budget and the layout only.

Properties in tests/trainer/test_spread.py: every sample once, what belongs together stays together, budget kept, cost balanced.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from services.trainer.batches import PackedBatch, Packer, TrainSample, assemble
from services.trainer.layout import Layout

ATTENTION_TOKENS = 12 * 1024
"""At this length attention costs as much as all else (12 x hidden size; only the proportion between samples matters)."""
PIPELINE_DEPTH = 2
"""Micro-batches a pipeline stage: more fill the pipeline better, fewer let training begin earlier."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Micro-batches by replica."""

    replicas: tuple[tuple[PackedBatch, ...], ...]

    @property
    def batches(self) -> list[PackedBatch]:
        """Those with samples, replica by replica."""
        return [batch for batches in self.replicas for batch in batches if batch.group_ids]


def cost(length: int) -> float:
    """Work that a sample of so many tokens makes, in tokens of a short one."""
    return length * (1 + length / ATTENTION_TOKENS)


class Spreader:
    """Fills one spread after another as samples arrive."""

    def __init__(self, token_budget: int, layout: Layout) -> None:
        self._layout, self._budget = layout, token_budget
        depth = PIPELINE_DEPTH * layout.pipeline if layout.pipeline > 1 else 1
        self._parallel = layout.data * depth > 1
        self._capacity = layout.data * depth * token_budget
        self._packer = Packer(token_budget)
        self._waiting: list[tuple[TrainSample, ...]] = []
        self._tokens = 0

    def add(self, *samples: TrainSample) -> list[Spread]:
        """Take a sample, or several that must stay together; the spreads that are full now (none or one)."""
        if not self._parallel:
            return [Spread(((batch,),)) for batch in self._packer.add(*samples)]
        length = self._packer.check(*samples)
        full = self.flush() if self._tokens + length > self._capacity else []
        self._waiting.append(samples)
        self._tokens += length
        return full

    def flush(self) -> list[Spread]:
        """What is left, as a spread of its own."""
        if not self._parallel:
            return [Spread(((batch,),)) for batch in self._packer.flush()]
        waiting, self._waiting, self._tokens = self._waiting, [], 0
        if not waiting:
            return []
        shares = [_pack(share, self._budget) for share in share_out(waiting, self._layout.data)]
        return [Spread(_fill_up(shares, self._layout))]


def spread(units: Iterable[tuple[TrainSample, ...]], token_budget: int, layout: Layout) -> list[Spread]:
    """All spreads of these samples."""
    builder = Spreader(token_budget, layout)
    found = [one for unit in units for one in builder.add(*unit)]
    return found + builder.flush()


def share_out(units: list[tuple[TrainSample, ...]], replicas: int) -> list[list[tuple[TrainSample, ...]]]:
    """The costliest first, each to the replica with the least so far; within a replica in the order of arrival."""
    costs = [sum(cost(len(sample.ids)) for sample in unit) for unit in units]
    loads, chosen = [0.0] * replicas, [[] for _ in range(replicas)]  # type: list[float], list[list[int]]
    for index in sorted(range(len(units)), key=lambda index: -costs[index]):
        replica = min(range(replicas), key=lambda number: (loads[number], len(chosen[number]), number))
        loads[replica] += costs[index]
        chosen[replica].append(index)
    return [[units[index] for index in sorted(indices)] for indices in chosen]


def _pack(units: list[tuple[TrainSample, ...]], budget: int) -> list[PackedBatch]:
    """As few micro-batches as the longest-first rule finds."""
    bins: list[tuple[int, list[TrainSample]]] = []
    for unit in sorted(units, key=lambda unit: -sum(len(sample.ids) for sample in unit)):
        length = sum(len(sample.ids) for sample in unit)
        for number, (used, members) in enumerate(bins):
            if used + length <= budget:
                bins[number] = (used + length, [*members, *unit])
                break
        else:
            bins.append((length, list(unit)))
    return [assemble(members) for _, members in bins]


def _fill_up(shares: list[list[PackedBatch]], layout: Layout) -> tuple[tuple[PackedBatch, ...], ...]:
    """Add empty micro-batches where ranks must keep step: between replicas, and to whole turns of virtual pipeline stages."""
    some = next(batches[0] for batches in shares if batches)
    most = max(len(batches) for batches in shares)
    unit = layout.pipeline if layout.virtual else 1
    filled = []
    for batches in shares:
        count = max(1, most if layout.in_step else len(batches))
        count = -(-count // unit) * unit
        filled.append((*batches, *[empty_like(some)] * (count - len(batches))))
    return tuple(filled)


def empty_like(batch: PackedBatch) -> PackedBatch:
    """A micro-batch of one token that nothing is learnt from. It has no group."""
    none = {
        name: getattr(batch, name)[:0]
        for name in ("rows_N", "targets_N", "mask_N", "rollout_logprobs_N", "advantages_N", "sequence_N")
    }
    return replace(
        batch,
        ids_T=batch.ids_T[:1],
        positions_T=np.zeros(1, dtype=batch.positions_T.dtype),
        lengths_S=np.ones(1, dtype=batch.lengths_S.dtype),
        extras={name: column[:0] for name, column in batch.extras.items()},
        group_ids=(),
        **none,
    )
