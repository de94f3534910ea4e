"""Where the reference policy's weights lie when the run file names no folder for them. Torch-free.

The trainer writes `<workdir>/reference/step-<n>` before the first update, and again every `reference.refresh_every` updates; the
newest two stay, since a reference service may still be reading the older one. A folder that exists is whole. A trainer that goes
on from an earlier step takes back what came after it. `tests/trainer/test_roles.py`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from shared.config import RunConfig

KEPT = 2


def due(config: RunConfig, step: int) -> bool:
    """The policy after `step` updates becomes the reference."""
    reference = config.reference
    if reference is None:
        return False
    every = reference.refresh_every
    return (step == 0 and reference.path is None) or (step > 0 and every > 0 and step % every == 0)


def written(config: RunConfig) -> dict[int, Path]:
    """Step -> folder."""
    found = {}
    for path in (config.work_path / "reference").glob("step-*"):
        if match := re.fullmatch(r"step-(\d+)", path.name):
            found[int(match[1])] = path
    return found


def newest(config: RunConfig) -> tuple[int, Path] | None:
    """(step, folder) of the reference as it is now; step 0 for the run file's own. None: the trainer has written none yet."""
    assert config.reference is not None
    found = written(config)
    if found:
        return max(found.items())
    return (0, config.path(config.reference.path)) if config.reference.path is not None else None


def folder(config: RunConfig, step: int) -> Path:
    return config.work_path / "reference" / f"step-{step}"


def forget(config: RunConfig, after: int) -> None:
    """Remove those of steps later than `after`, which are undone, and all but the newest of the rest."""
    found = written(config)
    kept = sorted(step for step in found if step <= after)[-KEPT:]
    for step, path in found.items():
        if step not in kept:
            shutil.rmtree(path)
