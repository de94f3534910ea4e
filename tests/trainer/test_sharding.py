"""Cutting tensors and laying them together are each other's inverse, for every kind of tensor and any number of parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from services.trainer.families import FAMILIES, weight_map
from services.trainer.families.entries import FUSED_NAMES, VALUE
from services.trainer.megatron.sharding import full_shapes, join, pieces, split
from tests.trainer.test_layout import DENSE, MIXTURE

ARCHITECTURES = {
    "qwen3": replace(DENSE, qk_norm=True),
    "qwen2-untied": replace(DENSE, family="qwen2", qkv_bias=True, tied=False),
    "llama": replace(DENSE, family="llama"),
    "qwen3_moe": replace(MIXTURE, qk_norm=True),
}


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cut_and_joined_again(name: str, parts: int) -> None:
    architecture = ARCHITECTURES[name]
    for entry in weight_map(architecture):
        full = [torch.randn(shape) for shape in full_shapes(entry, architecture)]
        count = 1 if entry.cut == "whole" else parts
        rows = -(-architecture.vocab // parts) if entry.vocabulary else None
        columns: list[list[torch.Tensor]] = [[] for _ in full]
        for index in range(count):
            wanted = pieces(entry, index, count, architecture)
            cut = [
                tensor.narrow(piece.dim, piece.start, piece.size) for tensor, piece in zip(full, wanted, strict=True)
            ]
            shard = join(entry, cut, architecture.kv_heads // count, rows)
            if rows is not None:
                assert len(shard) == rows
            back = split(
                entry, shard, architecture.kv_heads // count, architecture.head_dim, wanted[0].size if rows else None
            )
            for column, part in zip(columns, back, strict=True):
                column.append(part)
        for tensor, column in zip(full, columns, strict=True):
            assert torch.equal(torch.cat(column, 1 if entry.cut == "columns" else 0), tensor), entry


def test_the_map_names_every_tensor_once() -> None:
    assert {architecture.family for architecture in ARCHITECTURES.values()} == FAMILIES.keys()
    for architecture in ARCHITECTURES.values():
        entries = weight_map(architecture)
        for names in ([entry.megatron for entry in entries], [name for entry in entries for name in entry.hf]):
            assert len(names) == len(set(names))
            assert not any("{" in name for name in names)


def test_a_critic_has_a_value_in_place_of_the_vocabulary() -> None:
    assert tuple(weight_map(ARCHITECTURES["llama"], "value")[-2:]) == VALUE
    assert [full_shapes(entry, DENSE) for entry in VALUE] == [[(1, DENSE.hidden)], [(1,)]]


def test_fused_layers_are_known_by_the_plain_names() -> None:
    plain = {entry.megatron for entry in weight_map(DENSE)}
    for _, name in FUSED_NAMES:
        assert f"decoder.layers.0.{name}" in plain
