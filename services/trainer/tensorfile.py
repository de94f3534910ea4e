"""Writes safetensors files tensor by tensor, so that saving a model never needs a second copy of it in memory.

The library's own `save_file` wants all tensors at once; this writer is told the names and shapes first, writes the header,
then takes the tensors in that order, hashing on the way. Files are synced to the disk before `close` returns. A full disk
or a file-size limit is a `DiskFullError` that says how much was needed where. Reading is the library's.

Enforced by tests/trainer/test_tensorfile.py, which reads the files back with the safetensors library.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the safetensors format."""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DiskFullError(OSError):
    """There was no room for a file. Nothing that existed before was touched."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor to come: what the header has to know."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Spec:
        return cls(name, tensor.dtype, tuple(tensor.shape))


@contextmanager
def disk_errors(path: Path, needed: int) -> Iterator[None]:
    """Turns 'no space left' into DiskFullError with the figures; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        free = shutil.disk_usage(path.parent).free
        raise DiskFullError(
            error.errno,
            f"{path}: no room to write {needed / 1e6:.1f} MB ({error.strerror}; {free / 1e6:.1f} MB free): free some space, "
            "lift the limit, or move `workdir` to a larger disk",
        ) from error


class TensorWriter:
    """One safetensors file. Give it `specs`, then `write` every tensor in that order, then `close`."""

    def __init__(self, path: Path, specs: Sequence[Spec], metadata: dict[str, str] | None = None) -> None:
        self.path = path
        self._specs = list(specs)
        self._next = 0
        self._sha = hashlib.sha256()
        header: dict[str, object] = {"__metadata__": metadata or {"format": "pt"}}
        offset = 0
        for spec in self._specs:
            header[spec.name] = {
                "dtype": DTYPES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [offset, offset + spec.nbytes],
            }
            offset += spec.nbytes
        if len(header) != len(self._specs) + 1:
            raise ValueError(f"{path}: a tensor name occurs twice")
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the format wants the data aligned to 8 bytes
        self.nbytes = 8 + len(text) + offset
        self._file = path.open("wb")
        self._put(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: torch.Tensor, name: str | None = None) -> None:
        """The next tensor; it must match its spec, and so must its name if it is given."""
        if self._next == len(self._specs):
            raise ValueError(f"{self.path}: more tensors came than were announced")
        spec = self._specs[self._next]
        if name not in (None, spec.name):
            raise ValueError(f"{self.path}: announced {spec.name}, got {name}")
        if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
            raise ValueError(
                f"{spec.name}: announced {spec.dtype} {spec.shape}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        self._next += 1
        if spec.nbytes:
            self._put(memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))  # type: ignore[arg-type]

    def close(self) -> str:
        """Sync the file; its sha256 in hex."""
        if self._next != len(self._specs):
            raise ValueError(f"{self.path}: {len(self._specs) - self._next} announced tensors were not written")
        with disk_errors(self.path, self.nbytes):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._sha.hexdigest()

    def abort(self) -> None:
        """Close and remove the file after a failure."""
        with disk_errors(self.path, 0):
            self._file.close()
        self.path.unlink(missing_ok=True)

    def _put(self, data: bytes | memoryview) -> None:
        self._sha.update(data)
        with disk_errors(self.path, self.nbytes):
            self._file.write(data)


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries (renames, new files) survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
