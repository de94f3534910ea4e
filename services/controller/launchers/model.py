"""The policy's first weights: `model.build` is called where `model.path` does not exist.

It runs in a process of its own (`python -m services.controller.launchers.model`, the config on its standard input), so that
`slipstream up` never loads torch, and writes beside the target, which appears by one rename: a folder that exists is whole.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from shared import config as run_config
from shared.config import ConfigError, RunConfig

BUILD_DEADLINE_S = 600.0


async def ensure_model(config: RunConfig) -> bool:
    """Build the model folder if it is not there. True if it was built. Raises ConfigError with the end of what it printed."""
    folder = config.path(config.model.path)
    if (folder / "config.json").is_file():
        return False
    if config.model.build is None:
        raise ConfigError(
            f"model.path: {folder} holds no config.json; download a Hugging Face folder there, or set model.build to a function"
        )
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.controller.launchers.model",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(config.dump()), BUILD_DEADLINE_S)
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise ConfigError(
            f"model.build: {config.model.build} did not return within {BUILD_DEADLINE_S:.0f} s"
        ) from error
    if process.returncode != 0:
        lines = "\n".join(printed.decode(errors="replace").splitlines()[-12:])
        raise ConfigError(f"model.build: {config.model.build} failed:\n{lines}")
    return True


def build(config: RunConfig) -> None:
    """Call the user's function and put its folder in place."""
    assert config.model.build is not None
    folder = config.path(config.model.path)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        config.function(config.model.build, "model.build")(str(partial), config.seed)
        if not (partial / "config.json").is_file():
            raise SystemExit(f"{config.model.build} wrote no config.json into the folder that it was given")
        _rename(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # otherwise another process has built it meanwhile: the same model
            raise


if __name__ == "__main__":
    build(run_config.loads(sys.stdin.buffer.read()))
