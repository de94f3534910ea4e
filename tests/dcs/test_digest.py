"""Checksums and digests against numbers that are made without the code under test."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.dcs.digest import ManifestError, TensorSpec, checksum, differences, digest, dtype_name, tensor_checksum

A = TensorSpec("a", "float32", (2, 3), "a" * 64)
B = TensorSpec("b", "bfloat16", (), "b" * 64)


def test_checksum_is_over_little_endian_bytes() -> None:
    expected = hashlib.sha256(struct.pack("<3f", 1.0, -2.5, 3.25)).hexdigest()
    assert tensor_checksum(torch.tensor([1.0, -2.5, 3.25])) == expected


def test_checksum_of_bfloat16_is_over_the_upper_halves_of_float32() -> None:
    halves = b"".join(struct.pack("<f", value)[2:] for value in (1.0, -2.5, 3.25))
    assert tensor_checksum(torch.tensor([1.0, -2.5, 3.25], dtype=torch.bfloat16)) == hashlib.sha256(halves).hexdigest()


def test_checksum_sees_values_not_strides() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert tensor_checksum(tensor.t()) == tensor_checksum(tensor.t().contiguous()) != tensor_checksum(tensor)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1)])
def test_checksum_of_odd_shapes(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    assert tensor_checksum(tensor) == checksum(bytes(4 * tensor.numel()))


def test_digest_is_the_hash_of_the_sorted_lines() -> None:
    lines = f"a float32 2,3 {'a' * 64}\nb bfloat16  {'b' * 64}\n"
    assert digest([B, A]) == digest([A, B]) == hashlib.sha256(lines.encode()).hexdigest()


@given(st.sampled_from(["name", "dtype", "shape", "sha256"]))
def test_digest_changes_with_every_field(changed: str) -> None:
    other = {"name": "c", "dtype": "int32", "shape": (3, 2), "sha256": "c" * 64}[changed]
    fields = {"name": "a", "dtype": "float32", "shape": (2, 3), "sha256": "a" * 64} | {changed: other}
    assert digest([TensorSpec(**fields), B]) != digest([A, B])


def test_what_is_no_manifest_is_refused() -> None:
    with pytest.raises(ManifestError, match="tensor a: occurs twice"):
        digest([A, A])
    with pytest.raises(ManifestError, match="no tensors"):
        digest([])
    with pytest.raises(ManifestError, match="white space"):
        TensorSpec("a b", "float32", (1,), "a" * 64)
    with pytest.raises(ManifestError, match=r"tensor a: dtype 'torch.float32'"):
        TensorSpec("a", "torch.float32", (1,), "a" * 64)
    with pytest.raises(ManifestError, match="no sha256"):
        TensorSpec("a", "float32", (1,), "A" * 64)


def test_differences_names_absent_and_changed_tensors() -> None:
    assert differences([A, B], {"a": A.sha256, "b": B.sha256, "buffer": "x"}) == []
    assert differences([A, B], {"a": B.sha256}) == ["a", "b"]


def test_sizes() -> None:
    assert (A.nbytes, B.nbytes) == (24, 2)
    assert dtype_name(torch.zeros(1, dtype=torch.bfloat16)) == "bfloat16"
