"""A checkpoint as a Hugging Face folder. Needs torch to cast, but neither Megatron nor the layout that saved it.

The checkpoint is verified first; the folder appears complete or not at all. Tensors go one by one. tests/trainer/test_export.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from services.trainer.checkpoint import MANIFEST, MODEL, CheckpointError, CheckpointStore, verify
from services.trainer.hf_folder import save_hf
from services.trainer.state_files import open_state
from services.trainer.tensorfile import Spec, fsync_folder

WEIGHTS, MASTER = "weights/", "master/"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def find(path: Path) -> Path:
    """The checkpoint that is meant: the folder itself, or the newest in a folder of checkpoints or in a run's work folder."""
    if (path / MANIFEST).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        if entries := CheckpointStore(folder).entries():
            return entries[-1].path
    raise CheckpointError(
        f"{path}: no checkpoint here; give the folder of one, of several, or the run's work folder (workdir)"
    )


def export(checkpoint: Path, target: Path, dtype: str | None = None, max_shard_bytes: int = 4 << 30) -> list[str]:
    """Write the policy of `checkpoint` as a model folder at `target`; the names of its weight files.

    `dtype`: float32, bfloat16 or float16; None: as it was trained. float32 takes the optimiser's copies where there are some.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target}: exists already; give a new folder")
    verify(checkpoint)
    if not (checkpoint / MODEL / "config.json").is_file():
        raise CheckpointError(f"{checkpoint}: holds no {MODEL}/config.json, so it cannot be exported")
    part = target.with_name(f".{target.name}.{os.getpid()}")
    with open_state(checkpoint) as opened:
        names = opened.names()
        source = MASTER if dtype == "float32" and any(name.startswith(MASTER) for name in names) else WEIGHTS
        chosen = [name for name in names if name.startswith(source)]

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name in chosen:
                tensor = opened.whole(name)
                yield name.removeprefix(source), tensor if dtype is None else tensor.to(DTYPES[dtype])

        own = opened.whole(chosen[0]).dtype if dtype is None else DTYPES[dtype]
        specs = [Spec(name.removeprefix(source), own, opened.shape(name)) for name in chosen]
        try:
            files = save_hf(specs, tensors(), checkpoint / MODEL, part, max_shard_bytes)
            if target.exists():
                target.rmdir()
            os.rename(part, target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    fsync_folder(target.parent)
    return sorted(files)
