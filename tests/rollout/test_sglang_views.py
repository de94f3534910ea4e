"""Hugging Face tensors inside fused, sharded and padded parameters, with layers that have SGLang's attributes and class names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.rollout.engines.sglang.views import Unsupported, views

HIDDEN, HEADS, KV_HEADS, SIZE, FEED, VOCAB = 8, 4, 2, 3, 10, 21


class Layer(torch.nn.Module):
    def __init__(self, shape: tuple[int, ...], **attributes: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape))
        for name, value in attributes.items():
            setattr(self, name, value)


class QKVParallelLinear(Layer): ...


class MergedColumnParallelLinear(Layer): ...


class RowParallelLinear(Layer): ...


class VocabParallelEmbedding(Layer): ...


class RMSNorm(Layer): ...


class FusedMoE(Layer): ...


def model(rank: int, size: int) -> torch.nn.Module:
    """One tensor-parallel rank's part."""
    heads, kv_heads = HEADS // size, max(1, KV_HEADS // size)
    attributes = {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "num_kv_head_replicas": max(1, size // KV_HEADS),
        "total_num_heads": HEADS,
        "total_num_kv_heads": KV_HEADS,
        "head_size": SIZE,
        "v_head_size": SIZE,
        "tp_group": None if size == 1 else SimpleNamespace(rank_in_group=rank, world_size=size),
    }
    layer = torch.nn.Module()
    layer.qkv_proj = QKVParallelLinear(((heads + 2 * kv_heads) * SIZE, HIDDEN), **attributes)
    gate_up = {"output_sizes": [FEED * size, FEED * size], "tp_rank": rank, "tp_size": size}
    layer.gate_up_proj = MergedColumnParallelLinear((2 * FEED, HIDDEN), **gate_up)
    layer.o_proj = RowParallelLinear((HIDDEN, HEADS * SIZE // size), tp_rank=rank, tp_size=size)
    layer.norm = RMSNorm((HIDDEN,))
    rows = 32 // size  # padded
    first, last = min(rank * rows, VOCAB), min((rank + 1) * rows, VOCAB)
    here = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=last)
    layer.embed_tokens = VocabParallelEmbedding((rows, HIDDEN), shard_indices=here, org_vocab_size=VOCAB)
    layer.lm_head = layer.embed_tokens  # tied
    return layer


def whole(seed: int, size: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = {
        "q_proj": (HEADS * SIZE, HIDDEN),
        "k_proj": (KV_HEADS * SIZE, HIDDEN),
        "v_proj": (KV_HEADS * SIZE, HIDDEN),
        "gate_proj": (FEED * size, HIDDEN),
        "up_proj": (FEED * size, HIDDEN),
        "o_proj": (HIDDEN, HEADS * SIZE),
        "norm": (HIDDEN,),
        "embed_tokens": (VOCAB, HIDDEN),
    }
    return {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_tensor_is_found_whole_over_all_ranks(size: int) -> None:
    tensors = whole(0, size)
    found: dict[str, torch.Tensor] = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    for rank in range(size):
        named = views(model(rank, size))
        assert named.keys() == tensors.keys()
        for name, view in named.items():
            assert view.shape == tuple(tensors[name].shape)
            assert not view.holds(tensors[name]) or not view.size
            view.here().copy_(view.part(tensors[name]))
            assert view.holds(tensors[name])
            found[name].narrow(view.dim, view.offset, view.size).copy_(view.here())
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


def test_one_wrong_bit_is_seen() -> None:
    tensors = whole(0, 1)
    named = views(model(0, 1))
    view = named["k_proj.weight"]
    view.here().copy_(tensors["k_proj.weight"])
    changed = tensors["k_proj.weight"].clone()
    changed[-1, -1] = torch.nextafter(changed[-1, -1], torch.tensor(9.0))
    assert not view.holds(changed)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (FusedMoE((2, 3, 4)), "a parameter of FusedMoE"),
        (MergedColumnParallelLinear((4, 4), output_sizes=[1, 1, 2], tp_rank=0, tp_size=1), "fused"),
    ],
)
def test_layers_that_are_not_known_are_refused(layer: torch.nn.Module, said: str) -> None:
    with pytest.raises(Unsupported, match=said):
        views(torch.nn.ModuleDict({"experts": layer}))


def test_quantised_ones_too() -> None:
    layer = RMSNorm((4,))
    layer.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(Unsupported, match="quantised"):
        views(layer)
