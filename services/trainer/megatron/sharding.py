"""Between full Hugging Face tensors and the shards that ranks hold, tensor by tensor.

The weight map (services/trainer/families) says for each Megatron tensor which Hugging Face tensors it is made of and how it is
cut; here are the pure functions that cut and lay together, and `Shards`, which knows what this rank holds and brings tensors to
the leader or to the heads of the pipeline stages (`full`), or gives each rank its share of them (`own`). It goes through the map
in its order on all ranks at once, and only whom they come to ever holds a full tensor, one at a time. What belongs to a weight
and has its shape - gradients, Adam's moments, float32 copies - goes the same way.

tests/trainer/test_sharding.py (pure part), tests/trainer/layouts (between ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

from services.trainer.families import Head, weight_map
from services.trainer.families.entries import EMBEDDING, FUSED_NAMES, OUTPUT, VALUE, Entry
from services.trainer.layout import Layout
from services.trainer.model_folder import Architecture

LEADER, COPY = 0, " (copy)"


@dataclass(frozen=True, slots=True)
class Piece:
    """What a rank needs of one Hugging Face tensor: `size` rows or columns from `start`, or all of it."""

    name: str
    shape: tuple[int, ...]
    """Of the full tensor."""
    dim: int
    start: int
    size: int

    @property
    def whole(self) -> bool:
        return self.size == self.shape[self.dim]

    @property
    def count(self) -> int:
        """Numbers in it."""
        return prod(self.shape) // self.shape[self.dim] * self.size


def full_shapes(entry: Entry, architecture: Architecture) -> list[tuple[int, ...]]:
    """Shapes of the entry's Hugging Face tensors, as the architecture has them."""
    a = architecture
    ffn = a.experts.ffn if entry.expert and a.experts is not None else a.ffn
    if entry.join == "qkv":
        tail = () if entry.megatron.endswith("bias") else (a.hidden,)
        return [(heads * a.head_dim, *tail) for heads in (a.heads, a.kv_heads, a.kv_heads)]
    if entry.join == "gate_up":
        return [(ffn, a.hidden), (ffn, a.hidden)]
    if entry.vocabulary:
        return [(a.vocab, a.hidden)]
    if entry.cut == "columns":
        return [(a.hidden, ffn if "linear_fc2" in entry.megatron else a.heads * a.head_dim)]
    if entry in VALUE:
        return [(1,) if entry.megatron.endswith("bias") else (1, a.hidden)]
    if "router" in entry.megatron:
        assert a.experts is not None
        return [(a.experts.count, a.hidden)]
    return [(a.head_dim if entry.megatron.endswith(("q_layernorm.weight", "k_layernorm.weight")) else a.hidden,)]


def pieces(entry: Entry, index: int, parts: int, architecture: Architecture) -> list[Piece]:
    """What shard `index` of `parts` holds of each of the entry's Hugging Face tensors."""
    found = []
    for name, shape in zip(entry.hf, full_shapes(entry, architecture), strict=True):
        dim = 1 if entry.cut == "columns" else 0
        if entry.cut == "whole":
            found.append(Piece(name, shape, dim, 0, shape[dim]))
            continue
        size = -(-shape[dim] // parts)
        start = min(index * size, shape[dim])
        found.append(Piece(name, shape, dim, start, min(size, shape[dim] - start)))
    return found


def join(entry: Entry, parts: list[torch.Tensor], groups: int, rows: int | None = None) -> torch.Tensor:
    """Pieces of Hugging Face tensors -> the shard. `groups`: key/value heads in it. `rows`: fill up to so many."""
    if entry.join == "gate_up":
        return torch.cat(parts)
    if entry.join == "qkv":
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)
    (part,) = parts
    if rows is not None and len(part) < rows:
        part = torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])
    return part


def split(entry: Entry, shard: torch.Tensor, groups: int, head_dim: int, rows: int | None = None) -> list[torch.Tensor]:
    """The shard -> pieces of Hugging Face tensors. What is not joined is returned as it is, not copied."""
    if entry.join == "gate_up":
        return list(shard.chunk(2))
    if entry.join == "qkv":
        queries = len(shard) // (groups * head_dim) - 2
        sizes = [queries * head_dim, head_dim, head_dim]
        return [part.flatten(0, 1).contiguous() for part in shard.unflatten(0, (groups, -1)).split(sizes, dim=1)]
    return [shard if rows is None else shard[:rows]]


Local = Callable[[torch.nn.Parameter], torch.Tensor]
"""What to take of a parameter: itself, its gradient, a moment. Of the parameter's shape, on all ranks that hold it."""


class Shards:
    """What this rank holds of the model, and the way of tensors to the leader. Build it on all ranks at once."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], architecture: Architecture, layout: Layout, head: Head = "vocabulary"
    ) -> None:
        self.architecture, self.layout = architecture, layout
        self.entries = weight_map(architecture, head)
        self.parameters = _named(chunks)
        self._device = next(iter(self.parameters.values())).device
        self.held = dict(self.parameters)
        """All parameters of this rank by a name of its own."""
        if architecture.tied and OUTPUT.megatron in self.parameters:
            # A later pipeline stage has a copy of the embedding for the output.
            self.held[f"{EMBEDDING.megatron}{COPY}"] = self.held.pop(OUTPUT.megatron)
            del self.parameters[OUTPUT.megatron]
        self._tensor = parallel_state.get_tensor_model_parallel_rank()
        self._expert_tensor = parallel_state.get_expert_tensor_parallel_rank()
        table = self._table()
        self._holders = self._find_holders(table)
        self._writers = self._choose_writers(table)
        self._mark_cut()

    def unknown(self) -> list[str]:
        """Parameters that the map does not name."""
        return sorted(self.parameters.keys() - {entry.megatron for entry in self.entries})

    def names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(Hugging Face name, full shape) of everything, in the map's order."""
        for entry in self.entries:
            yield from zip(entry.hf, full_shapes(entry, self.architecture), strict=True)

    def here(self, entry: Entry) -> list[torch.nn.Parameter]:
        """The parameters of this rank that hold a shard of the entry: none, one, or a copy in addition."""
        return [self.held[name] for name in self.names_here(entry)]

    def names_here(self, entry: Entry) -> list[str]:
        """Their names in `held`."""
        return [name for name in (entry.megatron, f"{entry.megatron}{COPY}") if name in self.held]

    def cut(self, entry: Entry) -> tuple[int, int]:
        """(number of this rank's shard, shards) of the entry."""
        if entry.cut == "whole":
            return 0, 1
        return (self._expert_tensor, self.layout.expert_tensor) if entry.expert else (self._tensor, self.layout.tensor)

    def join(self, entry: Entry, parts: list[torch.Tensor]) -> torch.Tensor:
        """Pieces of this rank's shard -> the shard."""
        rows = -(-self.architecture.vocab // self.layout.tensor) if entry.vocabulary else None
        return join(entry, parts, self.architecture.kv_heads // self.cut(entry)[1], rows)

    def pieces(self, entry: Entry, index: int | None = None) -> list[Piece]:
        """What this rank's shard, or shard `index`, is made of."""
        own, parts = self.cut(entry)
        return pieces(entry, own if index is None else index, parts, self.architecture)

    def head_of(self, rank: int) -> int:
        """The first rank of a rank's pipeline stage: stages follow each other (layout.py)."""
        size = self.layout.ranks // self.layout.pipeline
        return rank // size * size

    def full(self, take: Local, dtype: torch.dtype, *, by_stage: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) of everything, in the map's order: on the leader, or, `by_stage`, on the head of the
        stage that has it. Nothing on other ranks, which must go through it all the same. Where nothing has to be laid
        together, tensors share memory with what `take` gave.

        `take` may be an operation of the data-parallel ranks: it is called for an entry on all ranks that hold it. `dtype`: of
        what it gives.
        """
        rank = dist.get_rank()
        for entry, holders in zip(self.entries, self._holders, strict=True):
            mine = self.parameters.get(entry.megatron)
            shard = None if mine is None else take(mine)
            taker = self.head_of(holders[0]) if by_stage else LEADER
            if rank == taker:
                yield from self._assemble(entry, holders, shard, dtype)
            elif shard is not None and rank in holders:
                dist.send(shard.contiguous(), taker)

    def own(self, take: Local) -> Iterator[tuple[Piece, torch.Tensor]]:
        """This rank's share of all shards, as pieces of Hugging Face tensors: of those that several ranks hold each has one
        writer, and the writers' shares are about equal. No tensor leaves its rank. `take` as in `full`."""
        rank = dist.get_rank()
        for entry, writers in zip(self.entries, self._writers, strict=True):
            mine = self.parameters.get(entry.megatron)
            if mine is None:
                continue
            shard = take(mine)
            if writers[self.cut(entry)[0]] == rank:
                found = self.pieces(entry)
                for piece, part in zip(found, self._split(entry, shard, found), strict=True):
                    if piece.size:
                        yield piece, part

    def _split(self, entry: Entry, shard: torch.Tensor, found: list[Piece]) -> list[torch.Tensor]:
        groups = self.architecture.kv_heads // self.cut(entry)[1]
        return split(entry, shard, groups, self.architecture.head_dim, found[0].size if entry.vocabulary else None)

    def _assemble(
        self, entry: Entry, holders: list[int], mine: torch.Tensor | None, dtype: torch.dtype
    ) -> Iterator[tuple[str, torch.Tensor]]:
        columns: list[list[torch.Tensor]] = [[] for _ in entry.hf]
        for index, holder in enumerate(holders):
            found = self.pieces(entry, index)
            if holder == dist.get_rank():
                assert mine is not None
                shard = mine
            else:
                shard = torch.empty(self._shard_shape(entry, index), dtype=dtype, device=self._device)
                dist.recv(shard, holder)
            for column, part in zip(columns, self._split(entry, shard, found), strict=True):
                column.append(part)
        dim = 1 if entry.cut == "columns" else 0
        for name, column in zip(entry.hf, columns, strict=True):
            yield name, column[0] if len(column) == 1 else torch.cat(column, dim)

    def _shard_shape(self, entry: Entry, index: int) -> tuple[int, ...]:
        found = self.pieces(entry, index)
        sizes = [[*piece.shape] for piece in found]
        for size, piece in zip(sizes, found, strict=True):
            size[piece.dim] = piece.size
        if entry.vocabulary:
            return (-(-self.architecture.vocab // self.layout.tensor), *sizes[0][1:])
        if entry.join == "same":
            return tuple(sizes[0])
        return (sum(size[0] for size in sizes), *sizes[0][1:])

    def _mark_cut(self) -> None:
        """Megatron marks what is cut only while it draws weights, which we spare it; the gradient's norm goes by the mark."""
        for entry in self.entries:
            for parameter in self.here(entry):
                if entry.cut != "whole" and not hasattr(parameter, "tensor_model_parallel"):
                    set_tensor_model_parallel_attributes(parameter, True, 1 if entry.cut == "columns" else 0, 1)

    def _table(self) -> list[list[int]]:
        """[ranks, entries] which shard of the entry the rank holds; -1: none."""
        mine = torch.tensor(
            [self.cut(e)[0] if e.megatron in self.parameters else -1 for e in self.entries],
            dtype=torch.int32,
            device=self._device,
        )
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, mine)
        return torch.stack(gathered).tolist()

    def _find_holders(self, table: list[list[int]]) -> list[list[int]]:
        """For each entry the lowest rank that holds each of its shards."""
        found = []
        for number, entry in enumerate(self.entries):
            lowest: dict[int, int] = {}
            for rank in range(len(table) - 1, -1, -1):
                if table[rank][number] >= 0:
                    lowest[table[rank][number]] = rank
            if sorted(lowest) != list(range(self.cut(entry)[1])):
                raise RuntimeError(f"no rank holds all of {entry.megatron}: found shards {sorted(lowest)}")
            found.append([lowest[index] for index in sorted(lowest)])
        return found

    def _choose_writers(self, table: list[list[int]]) -> list[list[int]]:
        """For each entry the rank that writes each of its shards: of those that hold it, the one that has least to write."""
        load, found = [0] * len(table), []
        for number, entry in enumerate(self.entries):
            writers = []
            for index in range(self.cut(entry)[1]):
                holders = [rank for rank, held in enumerate(table) if held[number] == index]
                writer = min(holders, key=lambda rank: (load[rank], rank))
                load[writer] += sum(piece.count for piece in self.pieces(entry, index))
                writers.append(writer)
            found.append(writers)
        return found


def _named(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Parameters by the map's names: layers and experts counted over all ranks, fused names as the map has them."""
    found = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            found[_global_name(name, chunk)] = parameter
    return found


def _global_name(name: str, chunk: torch.nn.Module) -> str:
    path = name.split(".")
    if path[:2] == ["decoder", "layers"]:
        path[2] = str(chunk.decoder.layers[int(path[2])].layer_number - 1)  # type: ignore[union-attr,index,operator]
    if "local_experts" in path:
        at = path.index("local_experts") + 1
        experts = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()  # type: ignore[union-attr,operator]
        path[at] = str(int(path[at]) + experts * parallel_state.get_expert_model_parallel_rank())
    found = ".".join(path)
    for fused, plain in FUSED_NAMES:
        if found.endswith(fused):
            return found.removesuffix(fused) + plain
    return found
