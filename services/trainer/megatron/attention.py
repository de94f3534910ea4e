"""Attention over packed sequences with torch's own kernels, context parallelism included; for where Transformer Engine is not.

T tokens of this rank, S sequences, B neighbouring sequences of one length L, Q query heads, K key/value heads, D head size,
C context-parallel ranks, P tokens of one of a sequence's 2C pieces.

Attention is causal and never crosses a sequence boundary: packing changes nothing but rounding (tests/trainer/test_megatron.py).
Under context parallelism each sequence is cut into 2C pieces of equal size, and rank r holds piece r and piece 2C-1-r: causal
work is then equal. Keys and values of all ranks are gathered, queries stay (tests/trainer/layouts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what the attention below needs in addition."""

    runs: tuple[tuple[int, int], ...] = ()
    """(B, L) of neighbouring sequences of equal length, in order: each run is one attention call without padding. L counts the
    sequence on all context-parallel ranks."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device, *, bounds: bool) -> PackedLayout:
        """The layout of sequences of these lengths, laid one after another.

        `bounds`: fill in the sequences' bounds, by which Transformer Engine attends and Megatron rotates positions. Without
        them Megatron takes the rotation as it is given, a position a token (model.py).
        """
        runs: list[tuple[int, int]] = []
        for length in lengths:
            count = runs.pop()[0] if runs and runs[-1][1] == length else 0
            runs.append((count + 1, length))
        longest = max(lengths)
        bounds_S = None
        if bounds:
            bounds_S = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        return cls("thd", bounds_S, bounds_S, max_seqlen_q=longest, max_seqlen_kv=longest, runs=tuple(runs))


class PackedAttention(MegatronModule):
    """Core attention with torch's scaled_dot_product_attention: one call a run of equal lengths and piece of the sequences."""

    def __init__(
        self, config: TransformerConfig, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.dropout = config.attention_dropout
        self.group = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query_TQD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedLayout,
        **_kwargs: Any,
    ) -> torch.Tensor:
        ranks = self.group.size()
        if ranks == 1:
            parts = self._whole(query_TQD, key_TKD, value_TKD, packed_seq_params.runs)
        else:
            both_CTK2D = _GatherFromRanks.apply(torch.cat([key_TKD, value_TKD], -1), self.group)
            parts = self._pieces(query_TQD, both_CTK2D, packed_seq_params.runs, ranks, self.group.rank())
        return torch.cat(parts).flatten(1) if len(parts) > 1 else parts[0].flatten(1)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """[B, L, heads, D] each -> [B * L, Q, D]. Without a mask it is causal."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        output_BQLD = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
            scale=self.scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return output_BQLD.transpose(1, 2).flatten(0, 1)

    def _whole(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, runs: tuple[tuple[int, int], ...]
    ) -> list[torch.Tensor]:
        outputs, start = [], 0
        for count, length in runs:
            end = start + count * length
            parts = [x[start:end].unflatten(0, (count, length)) for x in (query, key, value)]
            outputs.append(self._attend(parts[0], parts[1], parts[2], None))
            start = end
        return outputs

    def _pieces(
        self, query: torch.Tensor, both_CTK2D: torch.Tensor, runs: tuple[tuple[int, int], ...], ranks: int, rank: int
    ) -> list[torch.Tensor]:
        outputs, start = [], 0
        for count, length in runs:
            piece = length // (2 * ranks)
            end = start + count * 2 * piece
            own_B2PQD = query[start:end].unflatten(0, (count, 2, piece))
            # [C, B, 2, P, ...]: put the pieces of all ranks back into the order of the sequence.
            held = both_CTK2D[:, start:end].unflatten(1, (count, 2, piece))
            ordered = torch.cat([held[:, :, 0], held[:, :, 1].flip(0)]).transpose(0, 1).flatten(1, 2)
            key, value = ordered.chunk(2, -1)
            halves = []
            for half, index in enumerate((rank, 2 * ranks - 1 - rank)):
                seen = (index + 1) * piece
                mask = torch.ones(piece, seen, dtype=torch.bool, device=query.device).tril(seen - piece)
                found = self._attend(own_B2PQD[:, half], key[:, :seen], value[:, :seen], mask)
                halves.append(found.unflatten(0, (count, piece)))
            outputs.append(torch.stack(halves, 1).flatten(0, 2))
            start = end
        return outputs


class _GatherFromRanks(torch.autograd.Function):
    """[T, ...] of this rank -> [C, T, ...] of all; backwards each rank gets the sum of what all have for its part."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = values.new_empty(group.size(), *values.shape)
        dist.all_gather(list(gathered.unbind()), values.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        summed = gradient.contiguous()
        dist.all_reduce(summed, group=ctx.group)
        return summed[ctx.group.rank()], None
