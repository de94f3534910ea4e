"""Weights from a Hugging Face folder into this rank's shards, tensor by tensor: only what belongs to them is read.

Which tensor goes where is in the weight map (services/trainer/families). The way there and back is exact to the bit
(tests/trainer/test_weights.py, test_families.py).
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from services.trainer.hf_folder import open_weights
from services.trainer.megatron.sharding import Piece, Shards
from services.trainer.model_folder import ModelFolderError


@torch.no_grad()
def load_hf(shards: Shards, folder: str | Path) -> None:
    """Fill this rank's parameters from a folder, casting to their dtype. Missing or misshapen tensors are a ModelFolderError."""
    folder = Path(folder)
    if unknown := shards.unknown():
        raise ModelFolderError(f"{folder}: nothing maps to {', '.join(unknown)}")
    with ExitStack() as stack:
        where = open_weights(folder, stack)
        for entry in shards.entries:
            targets = shards.here(entry)
            if not targets:
                continue
            missing = [name for name in entry.hf if name not in where]
            if missing and entry.optional:
                continue
            if missing:
                raise ModelFolderError(
                    f"{folder}: tensor {missing[0]!r} is missing from the weights; is the folder complete?"
                )
            joined = shards.join(entry, [_read(where[piece.name], piece, folder) for piece in shards.pieces(entry)])
            for target in targets:
                target.copy_(joined)


def _read(opened: Any, piece: Piece, folder: Path) -> torch.Tensor:
    found = tuple(opened.get_slice(piece.name).get_shape())
    if found != piece.shape:
        raise ModelFolderError(
            f"{folder}: {piece.name} has shape {found}, but config.json asks for {piece.shape}; config.json and the weights "
            "do not belong together"
        )
    if piece.whole:
        return opened.get_tensor(piece.name)
    part = slice(piece.start, piece.start + piece.size)
    return opened.get_slice(piece.name)[part] if piece.dim == 0 else opened.get_slice(piece.name)[:, part]
