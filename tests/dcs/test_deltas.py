"""Deltas between snapshots: small, bit-equal, refused when they do not fit; and which chain is the cheapest."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.dcs import deltas, snapshots
from services.dcs.deltas import Delta, DeltaError, cheapest
from services.dcs.snapshots import FileEntry, Manifest
from services.trainer.weight_copy import Copier
from tests.dcs.conftest import stored

Weights = dict[str, torch.Tensor]
MiB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "snapshots"


def policy(rows: int = 40_000) -> Weights:
    torch.manual_seed(0)
    made = {"proj": torch.randn(rows, 64) * 0.02, "norm": torch.ones(64)}
    return {name: tensor.bfloat16() for name, tensor in made.items()}


def moved(weights: Weights, share: float = 0.01) -> Weights:
    """As an update leaves them: a small share of the numbers is the next one that bfloat16 has."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        chosen = (torch.rand(tensor.shape) < share).to(torch.int16)
        return (tensor.view(torch.int16) + chosen).view(torch.bfloat16)

    return {name: move(tensor) for name, tensor in weights.items()}


def snapshot(root: Path, version: int, weights: Weights) -> Manifest:
    copy = Copier(MiB).copy(weights.items())
    return stored(copy, root, root.parent / "model", version=version, step=version)


def apply(root: Path, base: int, chain: list[Delta], target: Path) -> tuple[int, str]:
    patches = [deltas.folder(root, delta.base, delta.version) / "model.safetensors" for delta in chain]
    return deltas.apply(snapshots.folder(root, base) / "model.safetensors", patches, target)


def file_of(manifest: Manifest) -> FileEntry:
    return next(entry for entry in manifest.files if entry.name == "model.safetensors")


def test_a_delta_is_small_and_gives_the_same_bytes(root: Path, tmp_path: Path) -> None:
    first = policy()
    second = moved(first)
    third = moved(second)
    manifests = [snapshot(root, version, weights) for version, weights in enumerate((first, second, third), start=1)]
    chain = [deltas.make(root, old, new) for old, new in pairwise(manifests)]
    assert all(delta is not None and delta.size < 0.1 * file_of(manifests[0]).size for delta in chain)
    assert [entry.name for entry in chain[0].files] == ["model.safetensors"]  # type: ignore[union-attr]
    assert deltas.known(root) == chain
    last = file_of(manifests[2])
    assert apply(root, 1, chain, tmp_path / "result") == (last.size, last.sha256)  # type: ignore[arg-type]


def test_what_is_not_worth_it_is_not_kept(root: Path) -> None:
    old = snapshot(root, 1, policy())
    other = {name: torch.randn(tensor.shape).bfloat16() for name, tensor in policy().items()}
    assert deltas.make(root, old, snapshot(root, 2, other)) is None
    assert deltas.make(root, old, snapshot(root, 3, policy(rows=10_000))) is None, "another size"
    assert deltas.known(root) == []
    assert not list((root / "deltas").iterdir())


def test_the_same_weights_are_a_delta_of_nothing(root: Path) -> None:
    old, new = snapshot(root, 1, policy()), snapshot(root, 2, policy())
    delta = deltas.make(root, old, new)
    assert delta is not None
    assert (delta.files, delta.size) == ([], 0)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "other base"])
def test_damage_never_gives_weights(root: Path, tmp_path: Path, damage: str) -> None:
    first = policy()
    old, new = snapshot(root, 1, first), snapshot(root, 2, moved(first))
    delta = deltas.make(root, old, new)
    assert delta is not None
    patch = deltas.folder(root, 1, 2) / "model.safetensors"
    data = bytearray(patch.read_bytes())
    if damage == "truncated":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
    patch.write_bytes(data)
    base = snapshot(root, 3, moved(first)).version if damage == "other base" else 1
    try:
        result = apply(root, base, [delta], tmp_path / "result")
    except DeltaError:
        return
    assert result != (file_of(new).size, file_of(new).sha256)


def test_the_newest_deltas_are_kept(root: Path) -> None:
    weights = policy(1000)
    manifests = []
    for version in range(1, 6):
        manifests.append(snapshot(root, version, weights))
        weights = moved(weights)
    for old, new in pairwise(manifests):
        assert deltas.make(root, old, new)
    (root / "deltas" / ".v9-from-v8").mkdir()
    deltas.prune(root, 2)
    assert [(delta.base, delta.version) for delta in deltas.known(root)] == [(3, 4), (4, 5)]
    assert len(list((root / "deltas").iterdir())) == 2


def delta(base: int, version: int, size: int) -> Delta:
    return Delta(base, version, "", "", [FileEntry("w", size, "")] if size else [])


def test_the_cheapest_way_counts_bytes() -> None:
    chain = [delta(1, 2, 10), delta(2, 3, 10), delta(3, 4, 10)]
    assert cheapest([1], 4, chain, full=100) == chain
    assert cheapest([1, 3], 4, chain, full=100) == chain[2:]
    assert cheapest([1], 4, chain, full=30) is None
    assert cheapest([1], 4, [*chain, delta(1, 4, 15)], full=100) == [delta(1, 4, 15)]
    assert cheapest([1], 4, chain[1:], full=100) is None, "the base is missing"
    assert cheapest([], 4, chain, full=100) is None
    assert cheapest([5], 4, chain, full=100) is None


@given(
    edges=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(0, 9)), max_size=12),
    have=st.sets(st.integers(1, 6), max_size=3),
    full=st.integers(1, 30),
)
def test_no_other_chain_is_cheaper(edges: list[tuple[int, int, int]], have: set[int], full: int) -> None:
    known = [delta(base, base + ahead, size) for base, ahead, size in edges]
    target = 7

    def best(version: int) -> float:
        if version == target:
            return 0.0
        return min((one.size + best(one.version) for one in known if one.base == version), default=float("inf"))

    expected = min((best(version) for version in have), default=float("inf"))
    found = cheapest(have, target, known, full)
    if expected < full:
        assert found is not None
        assert sum(one.size for one in found) == expected
        assert found[0].base in have
        assert [one.version for one in found] == [*(one.base for one in found[1:]), target]
    else:
        assert found is None
