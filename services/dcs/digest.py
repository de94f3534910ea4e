"""What identifies weights: a checksum for each tensor and one digest for a version. Pure.

The checksum of a tensor is the sha256 of its contiguous little-endian bytes, whatever its dtype (bfloat16 included), under
its Hugging Face name. The digest of a version is the sha256 over the sorted lines `name dtype shape checksum`, so it does not
depend on the order in which tensors are sent, stored or reported. Publisher, snapshot, engine and receiver all use these two
functions; none of them trusts another's word. Importing this module does not import torch: the DCS and the rollout worker
have none. tests/dcs/test_digest.py compares with independent numbers.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ITEM_SIZES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of an element, by torch's dtype name without the `torch.`: the dtypes that weights may have."""


class ManifestError(ValueError):
    """A list of tensors that cannot be weights. The text names the tensor."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a version."""

    name: str
    dtype: str
    """torch's name without the `torch.`"""
    shape: tuple[int, ...]
    sha256: str

    def __post_init__(self) -> None:
        if not self.name or any(letter.isspace() for letter in self.name):
            raise ManifestError(f"tensor name {self.name!r}: must be non-empty and without white space")
        if self.dtype not in ITEM_SIZES:
            raise ManifestError(f"tensor {self.name}: dtype {self.dtype!r} is none of {', '.join(ITEM_SIZES)}")
        if any(size < 0 for size in self.shape):
            raise ManifestError(f"tensor {self.name}: shape {list(self.shape)}")
        if len(self.sha256) != 64 or any(letter not in "0123456789abcdef" for letter in self.sha256):
            raise ManifestError(f"tensor {self.name}: {self.sha256!r} is no sha256 in hex")

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_SIZES[self.dtype]

    def line(self) -> str:
        return f"{self.name} {self.dtype} {','.join(map(str, self.shape))} {self.sha256}\n"


def digest(specs: Iterable[TensorSpec]) -> str:
    """The digest of a version. Raises ManifestError if a name occurs twice or there is no tensor."""
    by_name: dict[str, TensorSpec] = {}
    for spec in specs:
        if spec.name in by_name:
            raise ManifestError(f"tensor {spec.name}: occurs twice")
        by_name[spec.name] = spec
    if not by_name:
        raise ManifestError("no tensors: a version needs at least one")
    return hashlib.sha256("".join(sorted(spec.line() for spec in by_name.values())).encode()).hexdigest()


def differences(specs: Iterable[TensorSpec], checksums: Mapping[str, str]) -> list[str]:
    """Names whose checksum is absent or another; empty means verified. Names beyond `specs` are not looked at: an engine
    may report buffers that are no weights."""
    return [spec.name for spec in specs if checksums.get(spec.name) != spec.sha256]


def checksum(data: bytes | bytearray | memoryview | Any) -> str:
    """sha256 in hex of a buffer's bytes."""
    return hashlib.sha256(data).hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view of a tensor's contiguous bytes on the CPU (a copy only where one is needed)."""
    import torch

    if sys.byteorder != "little":
        raise ManifestError("checksums are over little-endian bytes; this machine is big-endian")
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


def tensor_checksum(tensor: torch.Tensor) -> str:
    return checksum(tensor_bytes(tensor).numpy())


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
