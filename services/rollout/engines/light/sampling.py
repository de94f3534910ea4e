"""Drawing tokens, row by row independent.

Guarantees:
* a drawn token depends on the row's logits and on one number in [0, 1) made from (seed, sample index, position) only: never on
  the batch around it, on what ran before, or on which process draws (tests/rollout/test_light_sampling.py);
* the log-probability is that of the temperature-scaled full softmax, before top-k, top-p and min-p, as SGLang's is;
* a token of probability 0 is never drawn.

The draw inverts the cumulative distribution in two levels (blocks, then inside one block) in float64: one number a row
instead of one a vocabulary entry, and exact far into the tail of a large vocabulary.

Shapes: B rows, V vocabulary, K blocks, C entries of a block
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

BLOCK = 256
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. `temperature` 0 is greedy."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_ids: frozenset[int] = frozenset()
    n: int = 1
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def filtered(self) -> bool:
        return not self.greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


def stream_key(seed: int, index: int) -> int:
    """The 64-bit key of the random stream of sample `index` under `seed`."""
    return _mix(_mix(seed & _MASK) + index * _GOLDEN)


def _mix(value: int) -> int:
    """The finaliser of splitmix64 over one step of its counter."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniforms(keys_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """One number in [0, 1) a row: entry `position` of the stream of `key`, with 52 bits."""
    value = keys_B + positions_B.astype(np.uint64) * np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value = value ^ (value >> np.uint64(31))
    return (value >> np.uint64(12)).astype(np.float64) * 2.0**-52


class Rows:
    """The sampling settings of the rows of a batch, made once when the batch changes and used every step."""

    def __init__(self, params: list[SamplingParams], device: torch.device) -> None:
        greedy = [p.greedy for p in params]
        scales = [p.temperature or 1.0 for p in params]  # greedy reports the unscaled distribution
        self.all_greedy = all(greedy)
        self.greedy_B = torch.tensor(greedy, device=device) if any(greedy) else None
        scaled = any(scale != 1.0 for scale in scales)
        self.temperature_B1 = torch.tensor(scales, device=device)[:, None] if scaled else None
        self.filters = _Filters(params, device) if any(p.filtered for p in params) else None

    def draw(self, logits_BV: torch.Tensor, uniforms_B: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [B] and their log-probabilities [B]."""
        if self.temperature_B1 is not None:
            logits_BV = logits_BV / self.temperature_B1
        probs_BV = logits_BV.softmax(-1)
        if self.all_greedy:
            ids_B = logits_BV.argmax(-1)
        else:
            kept_BV = probs_BV if self.filters is None else self.filters.keep(probs_BV)
            ids_B = invert(kept_BV, torch.from_numpy(uniforms_B).to(probs_BV.device))
            if self.greedy_B is not None:
                ids_B = torch.where(self.greedy_B, logits_BV.argmax(-1), ids_B)
        return ids_B, probs_BV.gather(1, ids_B[:, None])[:, 0].log_()


class _Filters:
    """Top-k, top-p and min-p together, each measured on the full distribution (SGLang's order for its pytorch backend)."""

    def __init__(self, params: list[SamplingParams], device: torch.device) -> None:
        chosen = [row for row, p in enumerate(params) if p.filtered]
        self.rows = torch.tensor(chosen, device=device)
        picked = [params[row] for row in chosen]
        self.top_k = torch.tensor([p.top_k if p.top_k > 0 else 2**31 for p in picked], device=device)[:, None]
        self.top_p = torch.tensor([p.top_p for p in picked], device=device)[:, None]
        self.min_p = torch.tensor([p.min_p for p in picked], device=device)[:, None]

    def keep(self, probs_BV: torch.Tensor) -> torch.Tensor:
        ordered, order = probs_BV[self.rows].sort(stable=True, dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered
        rank = torch.arange(ordered.shape[1], device=ordered.device)
        out = (rank >= self.top_k) | (before > self.top_p) | (ordered < ordered[:, :1] * self.min_p)
        out[:, 0] = False  # the likeliest token always stays
        return probs_BV.index_copy(
            0, self.rows, torch.zeros_like(ordered).scatter_(1, order, ordered.masked_fill(out, 0.0))
        )


def invert(probs_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative sum of `probs` (need not sum to 1) passes `uniform` times the whole."""
    vocab = probs_BV.shape[1]
    if vocab <= 4 * BLOCK:
        return _hit(probs_BV.cumsum(-1, dtype=torch.float64), uniforms_B)[0]
    if vocab % BLOCK:
        probs_BV = F.pad(probs_BV, (0, BLOCK - vocab % BLOCK))
    blocks_BKC = probs_BV.unflatten(1, (-1, BLOCK))
    sizes_BK = blocks_BKC.sum(-1, dtype=torch.float64)
    sums_BK = sizes_BK.cumsum(-1)
    block_B, target_B1 = _hit(sums_BK, uniforms_B)
    size_B1 = sizes_BK.gather(1, block_B[:, None])
    inside_B1 = (target_B1 - (sums_BK.gather(1, block_B[:, None]) - size_B1)) / size_B1
    rows_BC = blocks_BKC[torch.arange(len(block_B), device=probs_BV.device), block_B]
    within_B = _hit(rows_BC.cumsum(-1, dtype=torch.float64), inside_B1[:, 0].clamp_(0.0, 1.0 - 2.0**-52))[0]
    return block_B * BLOCK + within_B


def _hit(sums_BK: torch.Tensor, uniforms_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the first cumulative sum above `uniform` times the last one, and that product."""
    target_B1 = uniforms_B[:, None] * sums_BK[:, -1:]
    index_B1 = torch.searchsorted(sums_BK, target_B1, right=True)
    return index_B1[:, 0].clamp_(max=sums_BK.shape[1] - 1), target_B1  # beyond the end only if a sum is NaN
