"""The writer's files are what the safetensors library reads, and a full disk is a clear error."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.trainer.tensorfile import DTYPES, DiskFullError, Spec, TensorWriter


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    """The kernel refuses to let a file grow beyond `limit`, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    writer = TensorWriter(path, [Spec.of(name, tensor) for name, tensor in tensors.items()])
    for tensor in tensors.values():
        writer.write(tensor)
    return writer.close()


def test_reads_back_exactly_with_the_library(tmp_path: Path) -> None:
    tensors = {
        **{f"x.{name}": (torch.randn(3, 5) * 4).to(dtype) for dtype, name in DTYPES.items()},
        "scalar": torch.tensor(7.5),
        "empty": torch.zeros(0, 4),
        "transposed": torch.randn(4, 6).t(),
    }
    digest = write(tmp_path / "a.safetensors", tensors)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert digest == hashlib.sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest()


def test_a_tensor_that_was_not_announced_so_is_refused(tmp_path: Path) -> None:
    writer = TensorWriter(tmp_path / "a", [Spec("x", torch.float32, (2, 2))])
    with pytest.raises(ValueError, match=r"x: announced .* got"):
        writer.write(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="1 announced tensors were not written"):
        writer.close()


def test_full_disk_says_how_much_was_needed_where(tmp_path: Path) -> None:
    with (
        file_size_limit(1 << 16),
        pytest.raises(DiskFullError, match=r"a\.safetensors: no room to write 4\.0 MB.*free"),
    ):
        write(tmp_path / "a.safetensors", {"x": torch.zeros(1_000_000)})
