"""The ways in which weights are pulled: from a shared folder, by deltas, as a snapshot; and what happens when one fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from services.dcs import deltas, pulling, snapshots
from services.dcs.client import DcsUnavailable
from services.dcs.deltas import Delta
from services.dcs.snapshots import Manifest
from tests.dcs.conftest import World
from tests.dcs.test_deltas import moved, policy, snapshot
from tests.shared.runs import until


class Disk:
    """The DCS's side, without a network."""

    def __init__(self, root: Path) -> None:
        self.root, self.sent = root, 0
        self.cut_after: int | None = None

    async def manifest(self, version: int) -> Manifest:
        found = snapshots.read(self.root, version)
        assert found is not None
        return found

    async def deltas(self, version: int) -> list[Delta]:
        return deltas.known(self.root)

    async def download(self, version: int, name: str, into: Path, size: int) -> None:
        self._send(snapshots.folder(self.root, version) / name, into)

    async def download_delta(self, delta: Delta, name: str, into: Path, size: int) -> None:
        self._send(deltas.folder(self.root, delta.base, delta.version) / name, into)

    def _send(self, source: Path, into: Path) -> None:
        have = into.stat().st_size if into.exists() else 0
        rest = source.read_bytes()[have:]
        cut = self.cut_after is not None and len(rest) > self.cut_after
        rest = rest[: self.cut_after] if cut else rest
        self.sent += len(rest)
        with into.open("ab") as file:
            file.write(rest)
        if cut:
            raise DcsUnavailable("cut")


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """Versions 1 to 4 with the deltas between them."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    root, weights = tmp_path / "snapshots", policy()
    before = None
    for version in range(1, 5):
        manifest = snapshot(root, version, weights)
        if before is not None:
            assert deltas.make(root, before, manifest)
        before, weights = manifest, moved(weights)
    return Disk(root)


async def test_a_late_receiver_takes_the_chain(disk: Disk, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = await pulling.pull(disk, 1, cache)
    assert first.how == "snapshot"
    sent = disk.sent
    last = await pulling.pull(disk, 4, cache)
    assert (last.how, last.refused) == ("delta", "")
    assert disk.sent - sent == last.nbytes < 0.1 * sent
    assert snapshots.problems(last.folder, last.manifest) == []
    assert not list(cache.glob(".*"))
    assert (await pulling.pull(disk, 4, cache)).nbytes == 0


async def test_an_interrupted_chain_goes_on_where_it_was(disk: Disk, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    await pulling.pull(disk, 1, cache)
    before = disk.sent
    disk.cut_after = 20_000
    for _ in range(2):
        with pytest.raises(DcsUnavailable):
            await pulling.pull(disk, 4, cache)
    disk.cut_after = None
    last = await pulling.pull(disk, 4, cache)
    assert last.how == "delta"
    assert disk.sent - before == last.nbytes


@pytest.mark.parametrize("fault", ["base missing", "base damaged", "delta damaged", "delta missing"])
async def test_a_chain_that_breaks_is_made_good_by_the_snapshot(disk: Disk, tmp_path: Path, fault: str) -> None:
    cache = tmp_path / "cache"
    base = (await pulling.pull(disk, 1, cache)).folder / "model.safetensors"
    patch = deltas.folder(disk.root, 2, 3) / "model.safetensors"
    if fault == "base missing":
        base.unlink()
    elif fault == "base damaged":
        base.write_bytes(bytes(base.stat().st_size))
    elif fault == "delta damaged":
        patch.write_bytes(bytes(patch.stat().st_size))
    else:
        patch.unlink()
    pulled = await pulling.pull(disk, 4, cache)
    assert pulled.how == "snapshot"
    assert "version 4 by deltas from version 1" in pulled.refused
    assert snapshots.problems(pulled.folder, pulled.manifest) == []


async def test_whoever_sees_the_folder_takes_the_files_there(disk: Disk, tmp_path: Path) -> None:
    pulled = await pulling.pull(disk, 3, tmp_path / "cache", shared=disk.root)
    assert (pulled.how, disk.sent) == ("folder", 0)
    shutil.rmtree(snapshots.folder(disk.root, 3))
    assert snapshots.problems(pulled.folder, pulled.manifest) == []


async def test_a_damaged_folder_is_not_taken_and_not_touched(disk: Disk, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shutil.copytree(snapshots.folder(disk.root, 3), shared / "v3")
    file = shared / "v3" / "model.safetensors"
    half = file.read_bytes()[: file.stat().st_size // 2]
    file.write_bytes(half)
    pulled = await pulling.pull(disk, 3, tmp_path / "cache", shared)
    assert pulled.how == "snapshot"
    assert snapshots.problems(pulled.folder, pulled.manifest) == []
    assert file.read_bytes() == half


async def test_what_two_versions_share_is_sent_and_stored_once(disk: Disk, tmp_path: Path) -> None:
    manifest = await disk.manifest(4)
    twin = snapshot(disk.root, 5, policy())
    assert {entry.sha256 for entry in twin.files} == {entry.sha256 for entry in (await disk.manifest(1)).files}
    same = [snapshots.folder(disk.root, version) / "model.safetensors" for version in (1, 5)]
    assert same[0].samefile(same[1])
    cache = tmp_path / "cache"
    await snapshots.pull(disk, 1, cache)
    sent = disk.sent
    await snapshots.pull(disk, 5, cache)
    assert disk.sent == sent
    snapshots.prune(disk.root, keep=set(), below=4)
    left = {entry.sha256 for entry in (*manifest.files, *twin.files)}
    assert {blob.name for blob in snapshots.blobs(disk.root).iterdir()} == left


async def test_a_far_replica_follows_by_deltas_beside_the_broadcast(
    make_world: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And when its base is lost it says so, and pulls the snapshot: the last fault of docs/weights.md."""
    world: World = await make_world(dcs={"keep_deltas": 8})  # type: ignore[operator]
    await world.start_dcs()
    publisher = await world.publisher()
    weights = {**policy(), "scale": policy()["norm"][0]}
    await world.publish(publisher, 0, weights)
    near = await world.replica("rollout-near")
    monkeypatch.setenv("SLIPSTREAM_FAR", "1")
    far = await world.replica("rollout-far")

    async def follow(step: int) -> dict[str, str]:
        nonlocal weights
        weights = {**moved(weights), "scale": weights["scale"] + 1}
        version = await world.publish(publisher, step, weights)
        for replica in (near, far):
            await replica.holds(version)
            assert await replica.engine.value() == float(weights["scale"])
        await until(lambda: answered(version), "both said so")
        return {r.replica: r.how for r in await world.received(version)}

    async def answered(version: int) -> bool:
        return len(await world.received(version)) == 2

    assert await follow(1) == {"rollout-near": "broadcast", "rollout-far": "delta"}
    held = far.receiver.version
    (world.folder / "cache" / "rollout-far" / f"v{held}" / "model.safetensors").unlink()
    assert await follow(2) == {"rollout-near": "broadcast", "rollout-far": "snapshot"}
    (event,) = [event for event in await world.events() if event.kind == "delta_refused"]
    assert f"version {held + 1} by deltas from version {held}" in event.message
    assert await follow(3) == {"rollout-near": "broadcast", "rollout-far": "delta"}
