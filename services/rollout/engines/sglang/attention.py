"""One padded attention call a layer in place of SGLang's loop over sequences on a CPU (`torch_native`): for speed only.

B sequences, T new tokens of all of them, Q longest run of new tokens, L longest sequence, H query heads, G key-value heads,
D head size. Whatever is not plain causal attention goes to SGLang's own loop. `make test-sglang` compares log-probabilities
with those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

Loop = Callable[..., torch.Tensor]


def decode(
    loop: Loop,
    backend: Any,
    query_BHD: torch.Tensor,
    output_BHD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    rows_B: torch.Tensor,
    lengths_B: torch.Tensor,
    *rest: Any,
    **options: Any,
) -> torch.Tensor:
    """One new token a sequence."""
    if not _plain(rest, options):
        arguments = (query_BHD, output_BHD, keys, values, slots, rows_B, lengths_B)
        return loop(backend, *arguments, *rest, **options)
    positions_L = torch.arange(int(lengths_B.max()), device=query_BHD.device)
    kept_BL = positions_L[None, :] < lengths_B[:, None]
    keys_BGLD, values_BGLD = _cached(keys, values, slots, rows_B, kept_BL, query_BHD.dtype)
    result_BH1D = scaled_dot_product_attention(
        query_BHD.unsqueeze(2),
        keys_BGLD,
        values_BGLD,
        attn_mask=kept_BL[:, None, None, :],
        scale=options.get("scaling"),
        enable_gqa=options.get("enable_gqa", False),
    )
    return output_BHD.copy_(result_BH1D.squeeze(2))


def extend(
    loop: Loop,
    backend: Any,
    query_THD: torch.Tensor,
    output_THD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    rows_B: torch.Tensor,
    lengths_B: torch.Tensor,
    cached_B: torch.Tensor,
    new_B: torch.Tensor,
    *rest: Any,
    **options: Any,
) -> torch.Tensor:
    """Prefill: several new tokens a sequence, behind those that are cached."""
    if not _plain(rest, options) or not options.get("causal", False):
        arguments = (query_THD, output_THD, keys, values, slots, rows_B, lengths_B, cached_B, new_B)
        return loop(backend, *arguments, *rest, **options)
    device = query_THD.device
    new_Q, positions_L = (
        torch.arange(int(new_B.max()), device=device),
        torch.arange(int(lengths_B.max()), device=device),
    )
    used_BQ = new_Q[None, :] < new_B[:, None]
    query_BQHD = query_THD.new_zeros(len(new_B), len(new_Q), *query_THD.shape[1:])
    query_BQHD[used_BQ] = query_THD
    kept_BL = positions_L[None, :] < lengths_B[:, None]
    seen_BQL = positions_L[None, None, :] <= (cached_B[:, None] + new_Q[None, :])[:, :, None]
    mask_BQL = (kept_BL[:, None, :] & seen_BQL) | ~used_BQ[:, :, None]  # a row that sees nothing would be NaN
    keys_BGLD, values_BGLD = _cached(keys, values, slots, rows_B, kept_BL, query_THD.dtype)
    result_BHQD = scaled_dot_product_attention(
        query_BQHD.transpose(1, 2),
        keys_BGLD,
        values_BGLD,
        attn_mask=mask_BQL[:, None],
        scale=options.get("scaling"),
        enable_gqa=options.get("enable_gqa", False),
    )
    return output_THD.copy_(result_BHQD.transpose(1, 2)[used_BQ])


def _plain(rest: tuple[Any, ...], options: dict[str, Any]) -> bool:
    special = any(options.get(name) is not None for name in ("encoder_lens", "sliding_window_size"))
    return not special and not options.get("is_cross_attn", False) and all(value is None for value in rest)


def _cached(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    rows_B: torch.Tensor,
    kept_BL: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cached keys and values [B, G, L, D]; slot 0 stands for what is beyond a sequence's end and masked."""
    slots_BL = slots[rows_B, : kept_BL.shape[1]] * kept_BL
    return keys[slots_BL].transpose(1, 2).to(dtype), values[slots_BL].transpose(1, 2).to(dtype)
