"""SGLang's parameters under their Hugging Face names: which part of which fused, sharded, padded matrix holds which tensor.

Read from SGLang's own layers, not from a model's name: fused q/k/v and gate/up, columns and rows over tensor-parallel ranks,
key-value heads that several ranks hold, a padded vocabulary. `Unsupported` is raised for layers that are not known here (experts,
quantised ones): such an engine is served by files, not by broadcast. tests/rollout/test_sglang_views.py has layers of these
shapes, `make test-sglang` the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

PLAIN = ("Linear", "ReplicatedLinear", "Embedding")


class Unsupported(ValueError):
    """A layer whose tensors cannot be named here. The text names it."""


@dataclass(frozen=True, slots=True)
class View:
    """A Hugging Face tensor, or this rank's part of it, inside a parameter."""

    parameter: torch.Tensor
    dim: int
    start: int
    size: int
    """Where it lies in the parameter, along `dim`."""
    offset: int
    whole: int
    """Where that part begins in the whole tensor, and how long the whole tensor is, along `dim`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        shape = list(self.parameter.shape)
        if shape:
            shape[self.dim] = self.whole
        return tuple(shape)

    @property
    def sharded(self) -> bool:
        return self.size != self.whole

    def here(self) -> torch.Tensor:
        """What this rank holds."""
        data = self.parameter.detach()
        return data.narrow(self.dim, self.start, self.size) if data.dim() else data

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank should hold of the whole tensor."""
        return tensor.narrow(self.dim, self.offset, self.size) if tensor.dim() else tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Bit for bit, in the engine's dtype."""
        mine, wanted = self.here(), self.part(tensor).to(self.parameter.device, self.parameter.dtype)
        return torch.equal(mine, wanted)


def views(model: torch.nn.Module) -> dict[str, View]:
    """Name -> view, of every parameter once. Raises Unsupported."""
    found: dict[str, View] = {}
    seen: set[int] = set()
    for path, layer in model.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            if id(parameter) in seen:  # tied embeddings
                continue
            seen.add(id(parameter))
            if not parameter.dtype.is_floating_point:
                raise Unsupported(f"{path}.{name}: {parameter.dtype}, so it is quantised")
            try:
                found.update(_of_layer(path, layer, name, parameter))
            except AttributeError as error:
                raise Unsupported(
                    f"{path}.{name}: this SGLang's {type(layer).__name__} is another ({error})"
                ) from error
    return found


def _of_layer(path: str, layer: Any, name: str, parameter: torch.Tensor) -> Iterator[tuple[str, View]]:
    """The tensors inside one parameter of one layer."""
    kind = {base.__name__ for base in type(layer).__mro__}
    full = f"{path}.{name}"
    if "QKVParallelLinear" in kind:
        yield from _fused(full, "qkv_proj", _query_key_value(layer), parameter)
    elif "MergedColumnParallelLinear" in kind:
        yield from _fused(full, "gate_up_proj", _gate_up(layer), parameter)
    elif "VocabParallelEmbedding" in kind:
        here = layer.shard_indices
        size = here.org_vocab_end_index - here.org_vocab_start_index
        yield full, View(parameter, 0, 0, size, here.org_vocab_start_index, layer.org_vocab_size)
    elif "ColumnParallelLinear" in kind:
        (rank, ranks), size = _ranks(layer), parameter.shape[0]
        yield full, View(parameter, 0, 0, size, rank * size, ranks * size)
    elif "RowParallelLinear" in kind and parameter.dim() == 2:
        (rank, ranks), size = _ranks(layer), parameter.shape[1]
        yield full, View(parameter, 1, 0, size, rank * size, ranks * size)
    elif "RowParallelLinear" in kind or "Norm" in type(layer).__name__ or kind & set(PLAIN):
        size = parameter.shape[0] if parameter.dim() else 1
        yield full, View(parameter, 0, 0, size, 0, size)
    else:
        raise Unsupported(f"{full}: a parameter of {type(layer).__name__}")


def _fused(
    full: str, fused: str, parts: list[tuple[str, int, int, int]], parameter: torch.Tensor
) -> Iterator[tuple[str, View]]:
    """`parts`: (name, rows here, first row in the whole, rows of the whole), in their order."""
    if fused not in full:
        raise Unsupported(f"{full}: fused, but not a {fused}")
    start = 0
    for name, size, offset, whole in parts:
        yield full.replace(fused, name), View(parameter, 0, start, size, offset, whole)
        start += size
    if start != parameter.shape[0]:
        raise Unsupported(f"{full}: {parameter.shape[0]} rows, but its parts have {start}")


def _ranks(layer: Any) -> tuple[int, int]:
    """(rank, ranks) among those that share the layer."""
    if not hasattr(layer, "tp_group"):
        return int(layer.tp_rank), int(layer.tp_size)
    group = layer.tp_group
    return (0, 1) if group is None else (int(group.rank_in_group), int(group.world_size))


def _query_key_value(layer: Any) -> list[tuple[str, int, int, int]]:
    query = layer.num_heads * layer.head_size
    key, value = layer.num_kv_heads * layer.head_size, layer.num_kv_heads * layer.v_head_size
    rank, _ = _ranks(layer)
    group = rank // layer.num_kv_head_replicas
    return [
        ("q_proj", query, rank * query, layer.total_num_heads * layer.head_size),
        ("k_proj", key, group * key, layer.total_num_kv_heads * layer.head_size),
        ("v_proj", value, group * value, layer.total_num_kv_heads * layer.v_head_size),
    ]


def _gate_up(layer: Any) -> list[tuple[str, int, int, int]]:
    if len(layer.output_sizes) != 2:
        raise Unsupported(f"{len(layer.output_sizes)} matrices fused into one, known are gate and up")
    rank, ranks = _ranks(layer)
    sizes = [whole // ranks for whole in layer.output_sizes]
    return [
        (name, size, rank * size, whole)
        for name, size, whole in zip(("gate_proj", "up_proj"), sizes, layer.output_sizes, strict=True)
    ]
