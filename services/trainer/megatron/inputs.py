"""What one rank feeds to the model for a micro-batch: the packed tokens filled up and cut as the layout asks.

T tokens of the micro-batch, S sequences, N trained tokens, C context-parallel ranks; F tokens after filling up, M of those here.

Fillers stand at the ends of sequences, where causal attention keeps every other token from seeing them; nothing is predicted
from them. All ranks that share a replica's micro-batch compute this from the same arrays, so they agree without a word.
Checked by tests/trainer/test_inputs.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.trainer.batches import PackedBatch
from services.trainer.layout import Layout
from services.trainer.megatron.attention import PackedLayout


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the tokens of a micro-batch lie on one context-parallel rank."""

    lengths_S: list[int]
    """After filling up, on all ranks together."""
    source_M: np.ndarray
    """Index in T of each token here; a filler repeats the last token of its sequence."""
    place_T: np.ndarray
    """Where each token lies here, or -1 if on another rank."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """On the device, as `PolicyModel.forward` takes them."""

    ids_M: torch.Tensor
    positions_M: torch.Tensor
    layout: PackedLayout
    rows_R: torch.Tensor
    """Where the tokens are from which this rank predicts: R of the N."""
    targets_R: torch.Tensor
    where_R: torch.Tensor | None
    """Their index in N; None if this rank has all."""


def place(lengths_S: np.ndarray, layout: Layout, rank: int, at_least: int = 0) -> Placement:
    """How rank `rank` of the context-parallel ranks holds sequences of these lengths, filled up to `at_least` tokens."""
    filled_S = _fill(lengths_S, layout)
    filled_S[-1] += max(0, at_least - int(filled_S.sum()))
    starts_S = np.cumsum(lengths_S) - lengths_S
    offsets_S = np.cumsum(filled_S) - filled_S
    position_F = np.arange(int(filled_S.sum())) - np.repeat(offsets_S, filled_S)
    source_F = np.repeat(starts_S, filled_S) + np.minimum(position_F, np.repeat(lengths_S, filled_S) - 1)
    index_T = np.arange(int(lengths_S.sum())) - np.repeat(starts_S - offsets_S, lengths_S)
    if layout.context == 1:
        return Placement(filled_S.tolist(), source_F, index_T)
    pieces = 2 * layout.context
    piece_F = position_F * pieces // np.repeat(filled_S, filled_S)
    here_F = (piece_F == rank) | (piece_F == pieces - 1 - rank)
    place_F = np.where(here_F, np.cumsum(here_F) - 1, -1)
    return Placement(filled_S.tolist(), source_F[here_F], place_F[index_T])


def common_length(batches: list[PackedBatch], layout: Layout) -> int:
    """To what the micro-batches of a call are filled up: virtual pipeline stages exchange tensors of one shape only."""
    return max(int(_fill(batch.lengths_S, layout).sum()) for batch in batches) if layout.virtual else 0


def _fill(lengths_S: np.ndarray, layout: Layout) -> np.ndarray:
    unit = layout.align_sequence
    filled_S = -(-lengths_S // unit) * unit
    filled_S[-1] += -int(filled_S.sum()) % layout.align_total
    return filled_S


def model_inputs(
    batch: PackedBatch, layout: Layout, rank: int, device: torch.device, *, bounds: bool, at_least: int = 0
) -> Inputs:
    """The micro-batch as context-parallel rank `rank` sees it."""
    placement = place(batch.lengths_S, layout, rank, at_least)
    rows_N = placement.place_T[batch.rows_N]
    targets_N, where = batch.targets_N, None
    if layout.context > 1:
        where = np.flatnonzero(rows_N >= 0)
        rows_N, targets_N = rows_N[where], targets_N[where]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.require(array, requirements="W")).to(device)

    return Inputs(
        ids_M=tensor(batch.ids_T[placement.source_M]),
        positions_M=tensor(batch.positions_T[placement.source_M]),
        layout=PackedLayout.of(placement.lengths_S, device, bounds=bounds),
        rows_R=tensor(rows_N),
        targets_R=tensor(targets_N),
        where_R=None if where is None else tensor(where),
    )
