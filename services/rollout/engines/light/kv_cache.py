"""Keys and values of the running rows, and the two ways of attending to them.

Owns `capacity` tokens of memory a layer, taken once at start and laid out as rows of equal length, `[rows, G, length, D]`. The
scheduler keeps the running requests in the first rows without a gap, so that a decode step reads plain views; rows are made
longer (`lay_out`) when a request needs it. `plan` decides what fits, before anything is started: a running request never
runs out of room (tests/rollout/test_light_kv_cache.py).

Attention of a decode step folds the query heads that share a key-value head into the query axis: keys are never repeated.

Shapes: B rows, T tokens, N >= B new tokens, H query heads, G key-value heads, R = H/G, D head size, L attended length
"""

from __future__ import annotations

from collections.abc import Iterable

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
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        self.capacity = round_up(capacity, ROW_UNIT)
        size = self.capacity * config.kv_heads * config.head_dim
        self._flat = [(_zeros(size, device, dtype), _zeros(size, device, dtype)) for _ in range(config.layers)]
        self.length = 0
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.lay_out(ROW_UNIT, 0, 0)

    def lay_out(self, length: int, used_rows: int, used_length: int) -> None:
        """Rows of `length` tokens from now on; the first tokens of the used rows are kept."""
        if length == self.length:
            return
        rows = self.capacity // length
        shape = (rows, self.kv_heads, length, self.head_dim)
        kept = [tuple(b[:used_rows, :, :used_length].clone() for b in pair) for pair in self._layers]
        size = rows * self.kv_heads * length * self.head_dim
        self._layers = [(k[:size].view(shape), v[:size].view(shape)) for k, v in self._flat]
        self.length = length
        for (keys, values), (old_keys, old_values) in zip(self._layers, kept, strict=False):
            keys[:used_rows, :, :used_length] = old_keys
            values[:used_rows, :, :used_length] = old_values

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layers[index]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one row to another."""
        for pair in self._layers:
            for buffer in pair:
                buffer[target, :, :length] = buffer[source, :, :length]

    def clear(self) -> None:
        """Forget everything: what a broken set of weights left (NaN) must not reach later requests through masked places."""
        for pair in self._flat:
            for buffer in pair:
                buffer.zero_()


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

    def attend(self, layer: int, q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(0, self.shape).transpose(1, 2) for x in (q_NHD, k_NGD, v_NGD))
        keys, values = self.cache.layer(layer)
        keys[self.rows_B, :, : self.shape[1]] = k
        values[self.rows_B, :, : self.shape[1]] = v
        out_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out_BHTD.transpose(1, 2).reshape(q_NHD.shape[0], -1)


class Decode:
    """One new token a row, in the cache's first rows; each row attends to its own tokens up to the new one.

    The model may be run over more rows than there are (padding): those attend to nothing and get zeros.
    """

    def __init__(self, cache: KVCache, positions_B: torch.Tensor, longest: int) -> None:
        self.cache = cache
        self.batch = positions_B.shape[0]
        self.attended = round_up(longest, LENGTH_UNIT)
        device = positions_B.device
        row_head_BG = torch.arange(self.batch * cache.kv_heads, device=device).view(self.batch, -1) * cache.length
        self.index_BG = (row_head_BG + positions_B.unsqueeze(1)).flatten()
        hidden_BL = torch.arange(self.attended, device=device) > positions_B.unsqueeze(1)
        dtype = cache.layer(0)[0].dtype
        mask_BL = torch.zeros(hidden_BL.shape, device=device, dtype=dtype).masked_fill_(hidden_BL, float("-inf"))
        self.mask_B11L = mask_BL[:, None, None]

    def attend(self, layer: int, q_NHD: torch.Tensor, k_NGD: torch.Tensor, v_NGD: torch.Tensor) -> torch.Tensor:
        rows, batch, head_dim = q_NHD.shape[0], self.batch, self.cache.head_dim
        keys, values = self.cache.layer(layer)
        keys.view(-1, head_dim).index_copy_(0, self.index_BG, k_NGD[:batch].reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, self.index_BG, v_NGD[:batch].reshape(-1, head_dim))
        q_BGRD = q_NHD[:batch].reshape(batch, self.cache.kv_heads, -1, head_dim)
        k_BGLD, v_BGLD = keys[:batch, :, : self.attended], values[:batch, :, : self.attended]
        out_BGRD = F.scaled_dot_product_attention(q_BGRD, k_BGLD, v_BGLD, attn_mask=self.mask_B11L)
        out = out_BGRD.reshape(batch, -1)
        return out if rows == batch else F.pad(out, (0, 0, 0, rows - batch))
