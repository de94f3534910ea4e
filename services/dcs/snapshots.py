"""Snapshots: the weights of a version as a Hugging Face folder, on the disk where the DCS serves them from.

    <root>/v12/                     complete: a folder gets this name only when everything in it is written
        config.json, tokenizer..., model-00001-of-00002.safetensors, ...
        snapshot.json               the manifest: files with size and sha256, tensors with checksums, buckets, digest
    <root>/.v12.<owner>.partial/    on its way; worth nothing until renamed
    <root>/blobs/<sha256>           a second name of every file above: what is the same in two versions is stored once

Owns this layout, what is kept, and downloading: resumed after an interruption, verified file by file, renamed as a whole,
so that a folder named v<N> is a version that can be served. tests/dcs/test_snapshots.py. No torch in here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from services.dcs.digest import ManifestError, TensorSpec, digest

log = logging.getLogger(__name__)

MANIFEST = "snapshot.json"
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,254}")
FOLDER = re.compile(r"v([1-9][0-9]*)")
PARTIAL = re.compile(r"\.v([1-9][0-9]*)\..*\.partial")
CHUNK = 4 << 20
TRIES = 3


class SnapshotError(RuntimeError):
    """A snapshot that is not what it should be. The text names the file."""


def check_name(name: str) -> None:
    """Raises SnapshotError unless `name` may be a file of a snapshot: no path, nothing hidden, not the manifest."""
    if not FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise SnapshotError(f"file name {name!r}: not one that a snapshot may hold")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a snapshot."""

    name: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        check_name(self.name)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What snapshot.json holds. Its tensors have the digest that it names: that is checked wherever one is read."""

    version: int
    step: int
    digest: str
    files: list[FileEntry]
    tensors: list[TensorSpec]
    buckets: list[list[int]]
    """Indices into `tensors`, bucket by bucket, in the order of sending."""
    sent_by: list[int] = field(default_factory=list)
    """The number of the sender of each bucket, if there are several: the trainer's pipeline stages, say."""

    def __post_init__(self) -> None:
        found = digest(self.tensors)
        if found != self.digest:
            raise SnapshotError(
                f"{MANIFEST} of version {self.version}: its tensors have the digest {found}, not {self.digest}"
            )
        if sorted(index for bucket in self.buckets for index in bucket) != list(range(len(self.tensors))):
            raise SnapshotError(f"{MANIFEST} of version {self.version}: the buckets do not hold every tensor once")
        if self.sent_by and (len(self.sent_by) != len(self.buckets) or min(self.sent_by) < 0):
            raise SnapshotError(f"{MANIFEST} of version {self.version}: sent_by does not name one sender a bucket")

    def dump(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def load(cls, data: bytes | str) -> Manifest:
        try:
            fields: dict[str, Any] = json.loads(data)
            fields["files"] = [FileEntry(**entry) for entry in fields["files"]]
            fields["tensors"] = [TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in fields["tensors"]]
            return cls(**fields)
        except (ValueError, KeyError, TypeError, ManifestError) as error:
            raise SnapshotError(f"{MANIFEST} is damaged: {error}") from error


# -- layout -----------------------------------------------------------------------------------------------------------


def folder(root: Path, version: int) -> Path:
    return root / f"v{version}"


def partial(root: Path, version: int, owner: str) -> Path:
    return root / f".v{version}.{owner}.partial"


def read(root: Path, version: int) -> Manifest | None:
    """The manifest of a complete snapshot, None if there is none. Raises SnapshotError if it is damaged."""
    try:
        manifest = Manifest.load((folder(root, version) / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    if manifest.version != version:
        raise SnapshotError(f"{folder(root, version)}: its {MANIFEST} speaks of version {manifest.version}")
    return manifest


def complete(root: Path, source: Path, manifest: Manifest) -> Path:
    """Seal a partial folder whose files are written: it gets its manifest and its name. A folder of that name gives way."""
    (source / MANIFEST).write_bytes(manifest.dump())
    for entry in manifest.files:
        _share(root, source / entry.name, entry.sha256)
    target = folder(root, manifest.version)
    if target.exists():
        shutil.rmtree(target)
    source.rename(target)
    return target


def blobs(root: Path) -> Path:
    """Every file of every version under the sha256 of its content: a second name of it."""
    return root / "blobs"


def _share(root: Path, path: Path, sha256: str) -> None:
    """Keep one copy of files that are the same in several versions: the tokenizer, or weights that an update left alone."""
    blob = blobs(root) / sha256
    blob.parent.mkdir(exist_ok=True)
    try:
        if blob.exists() and hash_file(blob)[1] == sha256:
            spare = path.with_name(f".{path.name}.same")
            os.link(blob, spare)
            spare.rename(path)
        else:
            blob.unlink(missing_ok=True)
            os.link(path, blob)
    except OSError as error:
        log.debug("%s is kept by itself: this disk has no links (%s)", path, error)


def versions(root: Path) -> list[int]:
    """Versions with a complete folder, ascending."""
    return sorted(number for _, number in _folders(root, FOLDER))


def prune(root: Path, keep: set[int], below: int) -> list[int]:
    """Remove what is older than version `below` and not in `keep`, abandoned partial folders too. Returns what went."""
    gone = []
    for pattern in (FOLDER, PARTIAL):
        for path, number in _folders(root, pattern):
            if number < below and (pattern is PARTIAL or number not in keep):
                shutil.rmtree(path, ignore_errors=True)  # a reader may hold files open; what is left goes the next time
                gone.append(number)
    for blob in blobs(root).iterdir() if gone and blobs(root).is_dir() else ():
        if blob.stat().st_nlink == 1:  # no version has it any more
            blob.unlink()
    return sorted(gone)


def _folders(root: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, int]]:
    for path in root.iterdir() if root.is_dir() else ():
        if match := pattern.fullmatch(path.name):
            yield path, int(match[1])


def hash_file(path: Path) -> tuple[int, str]:
    """(size, sha256) of a file."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def problems(source: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the files in `source`; empty means verified."""
    wrong = []
    for entry in manifest.files:
        path = source / entry.name
        if not path.is_file():
            wrong.append(f"{entry.name}: missing")
        elif hash_file(path) != (entry.size, entry.sha256):
            wrong.append(f"{entry.name}: its bytes are not those that were published")
    return wrong


# -- pulling ----------------------------------------------------------------------------------------------------------


class Source(Protocol):
    """Where snapshots are pulled from; services/dcs/client.py is one."""

    async def manifest(self, version: int) -> Manifest: ...

    async def download(self, version: int, name: str, into: Path, size: int) -> None:
        """Append to `into` what is missing of the file, up to `size` bytes."""


async def pull(source: Source, version: int, cache: Path) -> tuple[Path, Manifest]:
    """The verified folder of `version` below `cache`, all of it from `source`; pulling.py knows cheaper ways."""
    manifest = await source.manifest(version)
    if await asyncio.to_thread(have, cache, manifest):
        return folder(cache, version), manifest
    part = receiving(cache, manifest)
    await pull_files(source, manifest, cache, part)
    return await asyncio.to_thread(complete, cache, part, manifest), manifest


def receiving(cache: Path, manifest: Manifest) -> Path:
    """Where the files of a version are gathered. What an earlier, interrupted pull left is there."""
    # The digest in the name keeps bytes of other weights out, should a version number ever mean something else.
    part = partial(cache, manifest.version, manifest.digest[:16])
    part.mkdir(parents=True, exist_ok=True)
    return part


def have(cache: Path, manifest: Manifest) -> bool:
    """Whether the folder is there, whole and the same."""
    try:
        present = read(cache, manifest.version)
    except SnapshotError:
        return False
    return present == manifest and not problems(folder(cache, manifest.version), manifest)


async def pull_files(source: Source, manifest: Manifest, cache: Path, part: Path) -> int:
    """All files into `part`; those whose content is here already are not downloaded. Returns how many bytes were missing."""
    sent = 0
    for entry in manifest.files:
        if await asyncio.to_thread(_reuse, cache, entry, part / entry.name):
            continue

        async def download(into: Path, size: int, name: str = entry.name) -> None:
            await source.download(manifest.version, name, into, size)

        await pull_file(download, entry, part / entry.name, f"version {manifest.version}")
        sent += entry.size
    return sent


def _reuse(cache: Path, entry: FileEntry, path: Path) -> bool:
    """A file of that content, from whatever version."""
    blob = blobs(cache) / entry.sha256
    if not blob.is_file() or hash_file(blob) != (entry.size, entry.sha256):
        return False
    path.unlink(missing_ok=True)
    os.link(blob, path)
    return True


async def pull_file(download: Callable[[Path, int], Awaitable[None]], entry: FileEntry, path: Path, what: str) -> None:
    """One file, verified. `download(path, size)` appends what is missing."""
    for _ in range(TRIES):
        if not path.exists() or path.stat().st_size < entry.size or entry.size == 0:
            await download(path, entry.size)
        if await asyncio.to_thread(hash_file, path) == (entry.size, entry.sha256):
            return
        path.unlink()
    raise SnapshotError(f"{entry.name} of {what}: {TRIES} downloads had other bytes than were published")
