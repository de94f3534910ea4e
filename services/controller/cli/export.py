"""`slipstream export`: a checkpoint becomes a model folder."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .common import CONFIG, FAILED, fail


class Type(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, a folder of them, or a run's work folder.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The model folder to write; must not exist.", show_default=False)],
    dtype: Annotated[
        Type | None, typer.Option(help="Cast the weights; otherwise as trained.", show_default=False)
    ] = None,
) -> None:
    """Write a checkpoint's policy as a Hugging Face folder: safetensors, config, tokenizer.

    Of several checkpoints the newest is taken. Any layout may have saved it. The folder can be served, published, or be the
    `model.path` of another run.

    `slipstream export runs/sort-letters model`

    `slipstream export runs/big/checkpoints/checkpoint-00000007-step-00000140 model --dtype bfloat16`

    Exit codes: 0 written, 1 it could not be written, 2 there is no checkpoint to export.
    """
    try:
        from services.trainer.checkpoint import CheckpointError
        from services.trainer.export import export as write
        from services.trainer.export import find
    except ModuleNotFoundError as error:
        raise fail(f"export needs {error.name!r}: pip install 'slipstream-rl[trainer]'", CONFIG) from error
    try:
        found = find(checkpoint)
        files = write(found, out, None if dtype is None else dtype.value)
    except (CheckpointError, FileExistsError) as error:
        raise fail(str(error), CONFIG) from error
    except OSError as error:
        raise fail(f"cannot write {out}: {error}", FAILED) from error
    typer.echo(f"{found.name} -> {out} ({', '.join(files)})")
