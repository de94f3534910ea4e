"""How a receiver gets a version that it did not get by broadcast: the way that costs least, and always verified.

    what it has -> the shared folder, if this host sees it -> the cheapest chain of deltas from a version it has -> the snapshot

Each way ends in the same folder, named only when the sha256 of every file is that of the manifest. A way that fails (a base
that is missing, a damaged delta, a folder that is being removed) is told in `refused`, and the next one is taken. Downloads go
on where they were interrupted, also by the next process. tests/dcs/test_pulling.py.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from services.dcs import deltas, snapshots
from services.dcs.deltas import Delta, DeltaError
from services.dcs.snapshots import FileEntry, Manifest, Source

How = Literal["snapshot", "delta", "folder"]


class DeltaSource(Source, Protocol):
    """Where snapshots and deltas are pulled from; services/dcs/client.py is one."""

    async def deltas(self, version: int) -> list[Delta]:
        """All that may lead to `version`; waits for one that is being made."""

    async def download_delta(self, delta: Delta, name: str, into: Path, size: int) -> None:
        """As `download`, for a file of a delta."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """A verified folder."""

    folder: Path
    manifest: Manifest
    how: How
    nbytes: int
    """That were sent for it."""
    refused: str = ""
    """Why a cheaper way was not taken after all."""


async def pull(source: DeltaSource, version: int, cache: Path, shared: Path | None = None) -> Pulled:
    """The verified folder of `version` below `cache`. `shared`: the DCS's own snapshots, if this host may see them."""
    manifest = await source.manifest(version)
    if await asyncio.to_thread(snapshots.have, cache, manifest):
        return Pulled(snapshots.folder(cache, version), manifest, "snapshot", 0)
    part = snapshots.receiving(cache, manifest)
    if shared is not None and await asyncio.to_thread(_from_folder, shared, manifest, part):
        return await _done(cache, part, manifest, "folder", 0, "")
    refused, chain = "", await _chain(source, manifest, cache)
    if chain:
        try:
            await _by_deltas(source, manifest, cache, chain, part)
            return await _done(cache, part, manifest, "delta", sum(delta.size for delta in chain), "")
        except (snapshots.SnapshotError, OSError) as error:
            refused = f"version {version} by deltas from version {chain[0].base}: {error}"
    sent = await snapshots.pull_files(source, manifest, cache, part)
    return await _done(cache, part, manifest, "snapshot", sent, refused)


async def _done(cache: Path, part: Path, manifest: Manifest, how: How, nbytes: int, refused: str) -> Pulled:
    folder = await asyncio.to_thread(snapshots.complete, cache, part, manifest)
    return Pulled(folder, manifest, how, nbytes, refused)


def _from_folder(shared: Path, manifest: Manifest, part: Path) -> bool:
    """Take every file from the DCS's folder, as a second name of it where the disk is the same. False: it is not here whole."""
    source = snapshots.folder(shared, manifest.version)
    return all(take(source / entry.name, part / entry.name, entry) for entry in manifest.files)


def take(source: Path, target: Path, entry: FileEntry) -> bool:
    """A copy of a file that lies on a disk of this host, verified. False: it is not there, or not what was published."""
    # Under another name until it is verified: a download would append to what it finds, and this may be the DCS's own file.
    taken = target.with_name(f".{target.name}.taken")
    taken.unlink(missing_ok=True)
    try:
        _link(source, taken)
        right = snapshots.hash_file(taken) == (entry.size, entry.sha256)
    except FileNotFoundError:
        return False
    if right:
        taken.rename(target)
    else:
        taken.unlink()
    return right


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


async def _chain(source: DeltaSource, manifest: Manifest, cache: Path) -> list[Delta]:
    """The deltas to apply, in order; empty if the snapshot is the better way."""
    have = await asyncio.to_thread(_digests, cache)
    if not have:
        return []
    usable = [
        delta
        for delta in await source.deltas(manifest.version)
        if have.get(delta.base, delta.base_digest) == delta.base_digest
        and (delta.version != manifest.version or delta.digest == manifest.digest)
    ]
    full = sum(entry.size for entry in manifest.files)
    return deltas.cheapest(have, manifest.version, usable, full) or []


def _digests(cache: Path) -> dict[int, str]:
    """The versions that are here."""
    found = {}
    for version in snapshots.versions(cache):
        try:
            manifest = snapshots.read(cache, version)
        except snapshots.SnapshotError:
            continue  # it serves nobody, and the next pull of it replaces it
        if manifest is not None:
            found[version] = manifest.digest
    return found


async def _by_deltas(source: DeltaSource, manifest: Manifest, cache: Path, chain: list[Delta], part: Path) -> None:
    fetched = [await _fetch(source, delta, cache) for delta in chain]
    base = snapshots.folder(cache, chain[0].base)

    def patch() -> None:
        for entry in manifest.files:
            patches = [path / entry.name for path, d in zip(fetched, chain, strict=True) if _lists(d, entry.name)]
            if not patches:
                if not take(base / entry.name, part / entry.name, entry):
                    raise DeltaError(f"{base / entry.name}: is missing or damaged")
                continue
            (part / entry.name).unlink(missing_ok=True)
            if deltas.apply(base / entry.name, patches, part / entry.name) != (entry.size, entry.sha256):
                (part / entry.name).unlink()
                raise DeltaError(f"{entry.name}: the result has other bytes than were published")

    await asyncio.to_thread(patch)
    for path in fetched:
        await asyncio.to_thread(shutil.rmtree, path)


def _lists(delta: Delta, name: str) -> bool:
    return any(entry.name == name for entry in delta.files)


async def _fetch(source: DeltaSource, delta: Delta, cache: Path) -> Path:
    """The files of a delta, verified; what an interrupted pull left is used."""
    path = snapshots.partial(cache, delta.version, f"delta-{delta.base}-{delta.digest[:16]}")
    path.mkdir(parents=True, exist_ok=True)
    for entry in delta.files:

        async def download(into: Path, size: int, name: str = entry.name) -> None:
            await source.download_delta(delta, name, into, size)

        await snapshots.pull_file(download, entry, path / entry.name, f"the delta to version {delta.version}")
    return path
