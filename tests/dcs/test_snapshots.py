"""Snapshot folders: complete or absent, pulled in pieces, verified, pruned."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from services.dcs import snapshots
from services.dcs.client import DcsUnavailable
from services.dcs.digest import TensorSpec, checksum, digest
from services.dcs.snapshots import FileEntry, Manifest, SnapshotError

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 40, "empty.txt": b""}


def write(root: Path, version: int, files: dict[str, bytes] = FILES) -> Manifest:
    part = snapshots.partial(root, version, "owner")
    part.mkdir(parents=True)
    for name, data in files.items():
        (part / name).write_bytes(data)
    tensors = [TensorSpec("w", "float32", (2,), checksum(b"w%d" % version))]
    entries = [FileEntry(name, len(data), checksum(data)) for name, data in files.items()]
    manifest = Manifest(version, version - 1, digest(tensors), entries, tensors, [[0]])
    snapshots.complete(root, part, manifest)
    return manifest


class Disk:
    """Serves another folder, with faults."""

    def __init__(self, root: Path) -> None:
        self.root, self.sent = root, 0
        self.cut_after: int | None = None
        self.damage = 0

    async def manifest(self, version: int) -> Manifest:
        found = snapshots.read(self.root, version)
        assert found is not None
        return found

    async def download(self, version: int, name: str, into: Path, size: int) -> None:
        data = (snapshots.folder(self.root, version) / name).read_bytes()
        have = into.stat().st_size if into.exists() else 0
        rest = data[have:]
        if self.damage:
            self.damage -= 1
            rest = bytes(len(rest))
        cut = self.cut_after is not None and len(rest) > self.cut_after
        with into.open("ab") as file:
            file.write(rest[: self.cut_after] if cut else rest)
        self.sent += min(len(rest), self.cut_after or len(rest))
        if cut:
            raise DcsUnavailable("cut")


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    write(tmp_path / "dcs", 3)
    return Disk(tmp_path / "dcs")


async def test_pull_gives_the_same_files(disk: Disk, tmp_path: Path) -> None:
    folder, manifest = await snapshots.pull(disk, 3, tmp_path / "cache")
    assert folder == tmp_path / "cache" / "v3"
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert manifest == snapshots.read(disk.root, 3) == snapshots.read(tmp_path / "cache", 3)


async def test_an_interrupted_pull_goes_on_where_it_was(disk: Disk, tmp_path: Path) -> None:
    disk.cut_after = 4000
    for _ in range(2):
        with pytest.raises(DcsUnavailable):
            await snapshots.pull(disk, 3, tmp_path / "cache")
        assert snapshots.versions(tmp_path / "cache") == []
    await snapshots.pull(disk, 3, tmp_path / "cache")
    assert disk.sent == sum(len(data) for data in FILES.values())


async def test_what_is_there_and_whole_is_not_pulled_again(disk: Disk, tmp_path: Path) -> None:
    folder, _ = await snapshots.pull(disk, 3, tmp_path / "cache")
    sent = disk.sent
    await snapshots.pull(disk, 3, tmp_path / "cache")
    assert disk.sent == sent
    (folder / "config.json").write_bytes(b"[]")
    await snapshots.pull(disk, 3, tmp_path / "cache")
    assert (folder / "config.json").read_bytes() == b"{}"


async def test_damaged_bytes_are_pulled_again_and_never_served(disk: Disk, tmp_path: Path) -> None:
    disk.damage = 1
    folder, manifest = await snapshots.pull(disk, 3, tmp_path / "cache")
    assert snapshots.problems(folder, manifest) == []
    disk.damage = 99
    with pytest.raises(SnapshotError, match="config.json of version 3: 3 downloads had other bytes"):
        await snapshots.pull(disk, 3, tmp_path / "other")
    assert snapshots.versions(tmp_path / "other") == []


def test_a_partial_folder_is_no_snapshot(tmp_path: Path) -> None:
    snapshots.partial(tmp_path, 4, "x").mkdir()
    assert snapshots.versions(tmp_path) == []
    assert snapshots.read(tmp_path, 4) is None


def test_problems_are_named(tmp_path: Path) -> None:
    manifest = write(tmp_path, 1)
    folder = snapshots.folder(tmp_path, 1)
    (folder / "config.json").unlink()
    (folder / "model.safetensors").write_bytes(b"short")
    assert snapshots.problems(folder, manifest) == [
        "config.json: missing",
        "model.safetensors: its bytes are not those that were published",
    ]


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    manifest = write(tmp_path, 1)
    path = snapshots.folder(tmp_path, 1) / snapshots.MANIFEST
    for data, why in (
        (b"{", "damaged"),
        (manifest.dump().replace(b'"w"', b'"v"'), "its tensors have the digest"),
        (dataclasses.replace(manifest, version=2).dump(), "speaks of version 2"),
        (manifest.dump().replace(b"config.json", b"../secrets"), "not one that a snapshot may hold"),
    ):
        path.write_bytes(data)
        with pytest.raises(SnapshotError, match=why):
            snapshots.read(tmp_path, 1)


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "", snapshots.MANIFEST, "a\\b", "x" * 300])
def test_file_names_that_are_refused(name: str) -> None:
    with pytest.raises(SnapshotError, match="file name"):
        snapshots.check_name(name)


def test_prune_keeps_what_is_wanted_and_what_is_newer(tmp_path: Path) -> None:
    for version in (1, 2, 3, 4, 6):
        write(tmp_path, version)
    snapshots.partial(tmp_path, 3, "dead").mkdir()
    snapshots.partial(tmp_path, 7, "writing").mkdir()
    assert snapshots.prune(tmp_path, keep={2, 4}, below=4) == [1, 3, 3]
    assert snapshots.versions(tmp_path) == [2, 4, 6]
    assert snapshots.partial(tmp_path, 7, "writing").exists()
