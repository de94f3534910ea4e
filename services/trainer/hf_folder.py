"""Hugging Face folders: opened to be read tensor by tensor, and written tensor by tensor, sharded, durable. Without Megatron.

Written folders are complete: config.json and the tokenizer come along, and config.json says which type was written. Enforced by
tests/trainer/test_weights.py, which reads them with transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.trainer.model_folder import COPIED_FILES, ModelFolderError
from services.trainer.tensorfile import Spec, TensorWriter, fsync_folder


def save_hf(
    specs: Iterable[Spec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: str | Path,
    target: str | Path,
    max_shard_bytes: int = 4 << 30,
) -> dict[str, str]:
    """Write `tensors`, which come as `specs` announces them, as a model folder with config.json and tokenizer of `source`.

    Returns sha256 by file name. Weights are sharded above `max_shard_bytes`. Files are durable when this returns.
    """
    source, target = Path(source), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    shards = _shards(list(specs), max_shard_bytes)
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
    # An iterator over ranks is walked to its very end, which lets the other ranks finish.
    if next(walk, None) is not None:
        raise ValueError("more tensors came than were announced")
    if len(shards) > 1:
        _write_index(target, shards)
    _copy_companions(source, target, {spec.dtype for members in shards.values() for spec in members})
    fsync_folder(target)
    return digests


def open_weights(folder: Path, stack: ExitStack) -> dict[str, Any]:
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


def companions(folder: Path) -> Iterator[Path]:
    """The files that make a folder complete beside its weights."""
    for pattern in COPIED_FILES:
        yield from (path for path in sorted(folder.glob(pattern)) if path.is_file())


def _copy_companions(source: Path, target: Path, dtypes: set[torch.dtype]) -> None:
    for path in companions(source):
        if path.resolve() != (target / path.name).resolve():
            shutil.copyfile(path, target / path.name)
    config_path = target / "config.json"
    config = json.loads(config_path.read_text(encoding="utf-8"))
    written = str(next(iter(dtypes))).removeprefix("torch.") if len(dtypes) == 1 else None
    for key in ("dtype", "torch_dtype"):
        if written and config.get(key, written) != written:
            # A loader casts to what config.json says: it must say what was written.
            config[key] = written
            config_path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
