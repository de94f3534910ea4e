"""Keys and values of the running rows, and the two ways of attending to them.

Owns `capacity` tokens of memory a layer, taken once at start and laid out as rows of equal length. The scheduler keeps the
running requests in the first rows without a gap, so that a decode step reads plain views; rows are made longer (`lay_out`) when
a request needs it. `plan` decides what fits, before anything is started: a running request never runs out of room
(tests/rollout/test_light_kv_cache.py).

Attention of a decode step folds the query heads that share a key-value head into the query axis: keys are never repeated.

Shapes: B rows, T tokens, N new tokens of all rows, H query heads, G key-value heads, S = H + 2G, R = H/G, D head size,
L attended length
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import numpy as np
import torch
import torch.nn.functional as F

from services.rollout.engines.light.model import LENGTH_UNIT, ModelConfig, round_up

ROW_UNIT = 64
"""Rows have a multiple of this many tokens, so that prompts of slightly different lengths do not force a new layout each."""


def row_length(tokens: int) -> int:
    return round_up(max(tokens, 1), ROW_UNIT)


def plan(running: int, length: int, needs: Iterable[int], capacity: int, max_rows: int) -> tuple[int, int]:
    """How many of the waiting requests (their `needs` in tokens, in order) can start now, and the rows' length then."""
    count = 0
    if not running:
        length = 0  # nothing has to be kept: rows may become shorter again
    for need in needs:
        wanted = max(length, row_length(need))
        rows = running + count + 1
        if rows > max_rows or rows * wanted > capacity:
            break
        count, length = count + 1, wanted
    return count, length


class KVCache:
    def __init__(self, config: ModelConfig, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.device = device
        self.capacity = round_up(capacity, ROW_UNIT)
        self._dtype, self._count = dtype, config.layers
        self._flat: list[torch.Tensor] = []
        self.length = 0
        self.layers: list[torch.Tensor] = []
        """One [rows, 2G, length, D] a layer: key heads, then value heads."""
        self.take()

    def take(self) -> None:
        """Take the memory, all of it empty."""
        size = self.capacity * 2 * self.kv_heads * self.head_dim
        self._flat = [_zeros(size, self.device, self._dtype) for _ in range(self._count)]
        self.length, self.layers = 0, []
        self.lay_out(ROW_UNIT, 0, 0)

    def give_back(self) -> None:
        """Give the memory back, until `take`."""
        self._flat, self.layers = [], []
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def lay_out(self, length: int, used_rows: int, used_length: int) -> None:
        """Rows of `length` tokens from now on; the first tokens of the used rows are kept."""
        if length == self.length:
            return
        rows = self.capacity // length
        shape = (rows, 2 * self.kv_heads, length, self.head_dim)
        kept = [layer[:used_rows, :, :used_length].clone() for layer in self.layers]
        self.layers = [flat[: prod(shape)].view(shape) for flat in self._flat]
        self.length = length
        for layer, old in zip(self.layers, kept, strict=False):
            layer[:used_rows, :, :used_length] = old

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one row to another."""
        for layer in self.layers:
            layer[target, :, :length] = layer[source, :, :length]

    def clear(self) -> None:
        """Forget everything: what a broken set of weights left (NaN) must not reach later requests through masked places."""
        for flat in self._flat:
            flat.zero_()


def _zeros(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Zeros, because masked places are still multiplied by 0 and uninitialised memory may hold NaN."""
    if device.type != "cpu":
        return torch.zeros(size, device=device, dtype=dtype)
    # calloc: memory that no request touches is never taken, so that the default capacity can be generous.
    return torch.from_numpy(np.zeros(size * dtype.itemsize, dtype=np.uint8)).view(dtype)


class Prefill:
    """New sequences, padded on the right: causal attention among themselves, nothing cached before."""

    def __init__(self, cache: KVCache, rows_B: torch.Tensor, length: int) -> None:
        self.cache, self.rows_B = cache, rows_B
        self.shape = (rows_B.shape[0], length)

    def attend(self, layer: int, qkv_NSD: torch.Tensor) -> torch.Tensor:
        heads, kv_heads = self.cache.heads, self.cache.kv_heads
        qkv_BSTD = qkv_NSD.unflatten(0, self.shape).transpose(1, 2)
        q, k, v = qkv_BSTD.split([heads, kv_heads, kv_heads], 1)
        self.cache.layers[layer][self.rows_B, :, : self.shape[1]] = qkv_BSTD[:, heads:]
        out_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out_BHTD.transpose(1, 2).reshape(qkv_NSD.shape[0], -1)


class Decode:
    """One new token a row, in the cache's first rows; each row attends to its own tokens up to the new one.

    The model may be run over more rows than there are (padding): those attend to nothing and get zeros.
    """

    def __init__(self, cache: KVCache, positions_B: torch.Tensor, longest: int) -> None:
        self.cache = cache
        self.batch = positions_B.shape[0]
        self.attended = round_up(longest, LENGTH_UNIT)
        position_B1 = positions_B.unsqueeze(1)
        row_heads = self.batch * 2 * cache.kv_heads
        starts = torch.arange(0, row_heads * cache.length, cache.length, device=cache.device)
        self.places = (starts.view(self.batch, -1) + position_B1).flatten()
        hidden_BL = torch.arange(self.attended, device=cache.device) > position_B1
        mask_BL = torch.zeros(hidden_BL.shape, device=cache.device, dtype=cache.layers[0].dtype)
        self.mask_B11L = mask_BL.masked_fill_(hidden_BL, float("-inf"))[:, None, None]

    def attend(self, layer: int, qkv_NSD: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, head_dim, batch = self.cache.heads, self.cache.kv_heads, self.cache.head_dim, self.batch
        cached = self.cache.layers[layer]
        cached.view(-1, head_dim).index_copy_(0, self.places, qkv_NSD[:batch, heads:].reshape(-1, head_dim))
        k_BGLD, v_BGLD = cached[:batch, :, : self.attended].split(kv_heads, 1)
        q_BGRD = qkv_NSD[:batch, :heads].unflatten(1, (kv_heads, -1))
        out_BGRD = F.scaled_dot_product_attention(q_BGRD, k_BGLD, v_BGLD, attn_mask=self.mask_B11L)
        out = out_BGRD.reshape(batch, -1)
        padding = qkv_NSD.shape[0] - batch
        return F.pad(out, (0, 0, 0, padding)) if padding else out
