"""The files of a saved state: one from each rank, with the pieces that it wrote; read back as whole tensors or any part of them.

A key is the tensor's name, or `NAME@DIM:START` for a piece of it. So the files say by themselves what lies where, and whoever
reads them knows nothing of the ranks that wrote them. A rank's file is written by a thread of its own from copies in host
memory, each of which is let go as soon as it is written.

tests/trainer/test_state_files.py; between layouts tests/trainer/layouts.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from services.trainer.tensorfile import Spec, TensorWriter
from shared.failpoints import reach

PATTERN = "state-*.safetensors"
KEY = re.compile(r"(?P<name>.*)@(?P<dim>\d+):(?P<start>\d+)")

Written = dict[str, Any]
"""{"size", "sha256"} of a file."""


def file_of(rank: int) -> str:
    return f"state-{rank:05d}.safetensors"


def key_of(name: str, dim: int, start: int) -> str:
    """Of a piece of tensor `name` that begins at `start` of side `dim`."""
    return f"{name}@{dim}:{start}"


def write(path: Path, tensors: list[tuple[str, torch.Tensor]]) -> Written:
    """Write a file, durable when this returns. Empties `tensors` as it goes."""
    writer = TensorWriter(path, [Spec.of(*item) for item in tensors])
    try:
        tensors.reverse()
        while tensors:
            name, tensor = tensors.pop()
            writer.write(tensor, name)
            reach("checkpoint.writing")
        return {"size": writer.nbytes, "sha256": writer.close()}
    except BaseException:
        writer.abort()
        raise


def write_behind(path: Path, tensors: list[tuple[str, torch.Tensor]]) -> Future[Written]:
    """`write` in a thread that does not keep the process from ending."""
    future: Future[Written] = Future()

    def work() -> None:
        try:
            future.set_result(write(path, tensors))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=work, name="checkpoint", daemon=True).start()
    return future


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece as it lies in a file."""

    dim: int
    start: int
    shape: tuple[int, ...]
    opened: Any
    key: str

    @property
    def size(self) -> int:
        return self.shape[self.dim]

    def read(self, dim: int, start: int, stop: int) -> torch.Tensor:
        if (start, stop) == (0, self.shape[dim]):
            return self.opened.get_tensor(self.key)
        return self.opened.get_slice(self.key)[(*[slice(None)] * dim, slice(start, stop))]


class StateFiles:
    """All files of a folder, opened. Use `open_state`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._whole: dict[str, tuple[Any, tuple[int, ...]]] = {}
        self._parts: dict[str, list[_Part]] = {}
        paths = sorted(folder.glob(PATTERN))
        if not paths:
            raise FileNotFoundError(f"{folder}: no {PATTERN} there")
        for path in paths:
            opened = stack.enter_context(safe_open(path, framework="pt"))
            for key in opened.offset_keys():
                shape = tuple(opened.get_slice(key).get_shape())
                if match := KEY.fullmatch(key):
                    part = _Part(int(match["dim"]), int(match["start"]), shape, opened, key)
                    self._parts.setdefault(match["name"], []).append(part)
                else:
                    self._whole[key] = (opened, shape)
        for name, parts in self._parts.items():
            parts.sort(key=lambda part: part.start)
            ends = [0, *(part.start + part.size for part in parts)]
            if name in self._whole or [part.start for part in parts] != ends[:-1]:
                raise ValueError(f"{folder}: the pieces of {name} do not fit together")

    def names(self) -> list[str]:
        """Of all tensors, those of the first file first."""
        return [*self._whole, *self._parts]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        if name in self._whole:
            return self._whole[name][1]
        parts = self._parts[name]
        shape = list(parts[0].shape)
        shape[parts[0].dim] = parts[-1].start + parts[-1].size
        return tuple(shape)

    def whole(self, name: str) -> torch.Tensor:
        """All of a tensor."""
        if name in self._whole:
            return self._whole[name][0].get_tensor(name)
        parts = self._parts[name]
        return torch.cat([part.opened.get_tensor(part.key) for part in parts], parts[0].dim)

    def part(self, name: str, dim: int, start: int, size: int) -> torch.Tensor:
        """`size` rows or columns of a tensor. Only the pieces that they lie in are read."""
        if name in self._whole:
            opened, shape = self._whole[name]
            return _Part(dim, 0, shape, opened, name).read(dim, start, start + size)
        if self._parts[name][0].dim != dim:
            return self.whole(name).narrow(dim, start, size)
        found = [
            part.read(dim, max(start - part.start, 0), min(start + size - part.start, part.size))
            for part in self._parts[name]
            if part.start < start + size and start < part.start + part.size
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim)


@contextmanager
def open_state(folder: Path) -> Iterator[StateFiles]:
    """The state in `folder`. SafetensorError or OSError if a file cannot be read."""
    with ExitStack() as stack:
        yield StateFiles(folder, stack)
