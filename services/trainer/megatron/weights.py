"""The map between Hugging Face names and Megatron's, declared as data, and the three walks over it.

Each `Entry` says which HF tensors make one Megatron tensor and how they are laid together. `load_hf` fills a model from a
folder, `iter_hf` yields the model's tensors under HF names, and `save_hf` writes a folder that any HF tool reads. All three
go tensor by tensor, so none needs a second copy of the model. The round trip is exact to the bit
(tests/trainer/test_weights.py).

Joined tensors: `qkv` stacks, for each key/value group, the rows of its query heads, then its keys, then its values;
`gate_up` stacks the gate above the up projection.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from services.trainer.model_folder import COPIED_FILES, Architecture, ModelFolderError
from services.trainer.tensorfile import Spec, TensorWriter, fsync_folder


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron tensor and the HF tensors that it is made of. `{i}` stands for the layer."""

    megatron: str
    hf: tuple[str, ...]
    join: Literal["same", "qkv", "gate_up"] = "same"


QWEN3_LAYER = (
    Entry("decoder.layers.{i}.input_layernorm.weight", ("model.layers.{i}.input_layernorm.weight",)),
    Entry(
        "decoder.layers.{i}.self_attention.linear_qkv.weight",
        tuple(f"model.layers.{{i}}.self_attn.{x}_proj.weight" for x in "qkv"),
        "qkv",
    ),
    Entry("decoder.layers.{i}.self_attention.q_layernorm.weight", ("model.layers.{i}.self_attn.q_norm.weight",)),
    Entry("decoder.layers.{i}.self_attention.k_layernorm.weight", ("model.layers.{i}.self_attn.k_norm.weight",)),
    Entry("decoder.layers.{i}.self_attention.linear_proj.weight", ("model.layers.{i}.self_attn.o_proj.weight",)),
    Entry("decoder.layers.{i}.pre_mlp_layernorm.weight", ("model.layers.{i}.post_attention_layernorm.weight",)),
    Entry(
        "decoder.layers.{i}.mlp.linear_fc1.weight",
        tuple(f"model.layers.{{i}}.mlp.{x}_proj.weight" for x in ("gate", "up")),
        "gate_up",
    ),
    Entry("decoder.layers.{i}.mlp.linear_fc2.weight", ("model.layers.{i}.mlp.down_proj.weight",)),
)
QWEN3_BEFORE = (Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),)
QWEN3_AFTER = (Entry("decoder.final_layernorm.weight", ("model.norm.weight",)),)
QWEN3_OUTPUT = (Entry("output_layer.weight", ("lm_head.weight",)),)
"""Only where the output layer has a weight of its own."""


def weight_map(architecture: Architecture) -> list[Entry]:
    """Every Megatron tensor of this architecture, from the embedding to the output layer."""
    layers = [
        Entry(entry.megatron.format(i=i), tuple(name.format(i=i) for name in entry.hf), entry.join)
        for i in range(architecture.layers)
        for entry in QWEN3_LAYER
    ]
    return [*QWEN3_BEFORE, *layers, *QWEN3_AFTER, *(() if architecture.tied else QWEN3_OUTPUT)]


def join(entry: Entry, parts: list[torch.Tensor], architecture: Architecture) -> torch.Tensor:
    """HF tensors -> the Megatron tensor."""
    if entry.join == "same":
        return parts[0]
    if entry.join == "gate_up":
        return torch.cat(parts)
    groups = architecture.kv_heads
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def split(entry: Entry, tensor: torch.Tensor, architecture: Architecture) -> list[torch.Tensor]:
    """The Megatron tensor -> HF tensors, contiguous. What is not joined is returned as it is, not copied."""
    if entry.join == "same":
        return [tensor]
    if entry.join == "gate_up":
        return list(tensor.chunk(2))
    groups, size = architecture.kv_heads, architecture.head_dim
    queries = architecture.heads // groups
    parts = tensor.unflatten(0, (groups, (queries + 2) * size)).split([queries * size, size, size], dim=1)
    return [part.flatten(0, 1).contiguous() for part in parts]


@torch.no_grad()
def load_hf(model: torch.nn.Module, folder: str | Path, architecture: Architecture) -> None:
    """Fill the model from a folder, casting to its dtype. Missing or misshapen tensors are a ModelFolderError."""
    folder = Path(folder)
    parameters = dict(model.named_parameters())
    with ExitStack() as stack:
        where = _open_weights(folder, stack)
        for entry in weight_map(architecture):
            missing = [name for name in entry.hf if name not in where]
            if missing:
                raise ModelFolderError(
                    f"{folder}: tensor {missing[0]!r} is missing from the weights; is the folder complete?"
                )
            joined = join(entry, [where[name].get_tensor(name) for name in entry.hf], architecture)
            target = parameters.pop(entry.megatron)
            if joined.shape != target.shape:
                raise ModelFolderError(
                    f"{folder}: {' + '.join(entry.hf)} make shape {tuple(joined.shape)}, but config.json asks for "
                    f"{tuple(target.shape)}; config.json and the weights do not belong together"
                )
            target.copy_(joined)
    if parameters:
        raise ModelFolderError(f"{folder}: nothing maps to {', '.join(sorted(parameters))}")


def iter_hf(model: torch.nn.Module, architecture: Architecture) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, tensor) in the map's order. Tensors may share the model's memory: copy what must outlive the next update."""
    parameters = dict(model.named_parameters())
    for entry in weight_map(architecture):
        parts = split(entry, parameters[entry.megatron].detach(), architecture)
        yield from zip(entry.hf, parts, strict=True)


def save_hf(
    tensors: Iterable[tuple[str, torch.Tensor]], source: str | Path, target: str | Path, max_shard_bytes: int = 4 << 30
) -> dict[str, str]:
    """Write `tensors` as a model folder, with config.json and the tokenizer of `source`. Returns sha256 by file name.

    `tensors` is walked twice: once for names and shapes, once for the data; give a list, or an object that makes a new
    iterator each time. Weights are sharded above `max_shard_bytes`. Files are durable when this returns.
    """
    source, target = Path(source), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    specs = [Spec.of(name, tensor) for name, tensor in tensors]
    shards = _shards(specs, max_shard_bytes)
    digests: dict[str, str] = {}
    walk = iter(tensors)
    for file_name, members in shards.items():
        writer = TensorWriter(target / file_name, members)
        try:
            for _ in members:
                writer.write(next(walk)[1])
            digests[file_name] = writer.close()
        except BaseException:
            writer.abort()
            raise
    if len(shards) > 1:
        _write_index(target, shards)
    _copy_companions(source, target, {spec.dtype for spec in specs})
    fsync_folder(target)
    return digests


def _open_weights(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> opened safetensors file that holds it."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        absent = sorted(name for name in named if not (folder / name).is_file())
        if absent:
            raise ModelFolderError(f"{folder}: {absent[0]} is listed in model.safetensors.index.json but not there")
        files = [folder / name for name in sorted(named)]
    if not files:
        raise ModelFolderError(
            f"{folder}: no *.safetensors file; convert the weights with save_pretrained(safe_serialization=True)"
        )
    where: dict[str, Any] = {}
    for path in files:
        try:
            opened = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelFolderError(f"{path}: not a readable safetensors file ({error})") from error
        where.update(dict.fromkeys(opened.keys(), opened))
    return where


def _shards(specs: list[Spec], limit: int) -> dict[str, list[Spec]]:
    """File name -> its tensors, in order, each file at most `limit` bytes unless one tensor alone is larger."""
    groups: list[list[Spec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def _write_index(target: Path, shards: dict[str, list[Spec]]) -> None:
    index = {
        "metadata": {"total_size": sum(spec.nbytes for members in shards.values() for spec in members)},
        "weight_map": {spec.name: file_name for file_name, members in shards.items() for spec in members},
    }
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _copy_companions(source: Path, target: Path, dtypes: set[torch.dtype]) -> None:
    for pattern in COPIED_FILES:
        for path in source.glob(pattern):
            if path.is_file() and path.resolve() != (target / path.name).resolve():
                shutil.copyfile(path, target / path.name)
    config_path = target / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    written = str(next(iter(dtypes))).removeprefix("torch.") if len(dtypes) == 1 else None
    for key in ("dtype", "torch_dtype"):
        if written and config.get(key, written) != written:
            # A loader casts to what config.json says: it must say what was written.
            config[key] = written
            config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
