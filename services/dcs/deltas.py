"""What changed from one version to the next, for receivers that pull: far away, late, or outside the broadcast.

In bfloat16 most weights do not change in one update of reinforcement learning, so the exclusive-or of the two versions' files is
mostly zeros: it is stored in blocks, each compressed with zstandard, under <root>/deltas/v<N>-from-v<M>/, with delta.json. The
DCS makes it after version N is announced, from the snapshots of both, and keeps it only if it is at most `WORTH` of them.

Guarantees: what a chain of deltas gives is verified like a download, file by file against the sha256 of version N's manifest, so
it is bit-equal or refused; a base that is missing or damaged is found that way. `cheapest` is pure. tests/dcs/test_deltas.py;
benchmarks/weight_sync.py measures size and time. No torch in here.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from services.dcs import snapshots
from services.dcs.snapshots import FileEntry, Manifest, SnapshotError

BLOCK = 4 << 20
LEVEL = -1
"""A fast one of zstandard's: zeros shrink as well under it."""
WORTH = 0.5
"""A delta larger than this share of the files is not kept."""
MANIFEST = "delta.json"
FOLDER = re.compile(r"v([1-9][0-9]*)-from-v([1-9][0-9]*)")


class DeltaError(SnapshotError):
    """A delta that cannot be made, read or applied. The text names it."""


@dataclass(frozen=True, slots=True)
class Delta:
    """From version `base` to `version`. Files that are not listed are the same in both."""

    base: int
    version: int
    base_digest: str
    digest: str
    files: list[FileEntry]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.files)

    def dump(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def load(cls, data: bytes | str) -> Delta:
        try:
            return cls.of(json.loads(data))
        except ValueError as error:
            raise DeltaError(f"{MANIFEST} is damaged: {error}") from error

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Delta:
        try:
            return cls(**{**fields, "files": [FileEntry(**entry) for entry in fields["files"]]})
        except (KeyError, TypeError) as error:
            raise DeltaError(f"{MANIFEST} is damaged: {error}") from error


def folder(root: Path, base: int, version: int) -> Path:
    return root / "deltas" / f"v{version}-from-v{base}"


def known(root: Path) -> list[Delta]:
    """Those that are complete, the oldest first."""
    found = []
    for _, path in sorted((int(match[1]), path) for path, match in _folders(root)):
        with suppress(FileNotFoundError):  # removed just now
            found.append(Delta.load((path / MANIFEST).read_bytes()))
    return found


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep`, and what was left half made."""
    newest = sorted(_folders(root), key=lambda found: int(found[1][1]), reverse=True)
    for path, _ in newest[keep:]:
        shutil.rmtree(path, ignore_errors=True)
    for path in (root / "deltas").glob(".*"):
        shutil.rmtree(path, ignore_errors=True)


def _folders(root: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in (root / "deltas").iterdir() if (root / "deltas").is_dir() else ():
        if match := FOLDER.fullmatch(path.name):
            yield path, match


# -- choosing ---------------------------------------------------------------------------------------------------------


def cheapest(have: Iterable[int], target: int, deltas: Iterable[Delta], full: int) -> list[Delta] | None:
    """The chain with the fewest bytes from one of the versions in `have` to `target`. None: the snapshot of `full` bytes is
    cheaper, or there is no chain."""
    cost: dict[int, tuple[int, list[Delta]]] = {version: (0, []) for version in have}
    for delta in sorted(deltas, key=lambda one: one.version):  # a base is older than what is made from it
        if delta.base in cost and delta.version <= target:
            size, chain = cost[delta.base]
            if delta.version not in cost or size + delta.size < cost[delta.version][0]:
                cost[delta.version] = size + delta.size, [*chain, delta]
    size, chain = cost.get(target, (full, []))
    return chain if chain and size < full else None


# -- making -----------------------------------------------------------------------------------------------------------


def make(root: Path, base: Manifest, new: Manifest) -> Delta | None:
    """Write the delta between two snapshots below `root`. None: it would not be worth it, or they are not alike."""
    pairs = _changed(base, new)
    if pairs is None:
        return None
    target = folder(root, base.version, new.version)
    part = target.parent / f".{target.name}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    left = int(WORTH * sum(entry.size for entry in new.files))
    files = []
    for entry in pairs:
        old_file, new_file = (snapshots.folder(root, m.version) / entry.name for m in (base, new))
        made = _write(old_file, new_file, part / entry.name, left)
        if made is None:
            shutil.rmtree(part)
            return None
        files.append(FileEntry(entry.name, *made))
        left -= made[0]
    delta = Delta(base.version, new.version, base.digest, new.digest, files)
    (part / MANIFEST).write_bytes(delta.dump())
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    return delta


def _changed(base: Manifest, new: Manifest) -> list[FileEntry] | None:
    """Files that differ. None if a delta cannot tell all of it: other files, or other sizes."""
    before = {entry.name: entry for entry in base.files}
    if before.keys() != {entry.name for entry in new.files}:
        return None
    changed = [entry for entry in new.files if entry.sha256 != before[entry.name].sha256]
    return None if any(entry.size != before[entry.name].size for entry in changed) else changed


def _write(old: Path, new: Path, target: Path, most: int) -> tuple[int, str] | None:
    """(size, sha256) of the delta between two files of one size; None if it exceeds `most` bytes."""
    compress = zstandard.ZstdCompressor(level=LEVEL).compress
    size, sha = 0, hashlib.sha256()
    with target.open("wb") as out:
        for change in _differences(old, new):
            packed = compress(change) if change is not None else b""
            block = len(packed).to_bytes(4, "little") + packed
            size += len(block)
            if size > most:
                return None
            sha.update(block)
            out.write(block)
    return size, sha.hexdigest()


def _differences(old: Path, new: Path) -> Iterator[memoryview | None]:
    """The exclusive-or, block by block; None for a block that is the same."""
    before, after = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint8)
    with old.open("rb", buffering=0) as a, new.open("rb", buffering=0) as b:
        while count := _fill(b, after):
            if _fill(a, before) != count:
                raise DeltaError(f"{old}: is shorter than {new}")
            change = np.bitwise_xor(before[:count], after[:count], out=before[:count])
            yield change.data if change.any() else None


def _fill(file: object, block: np.ndarray) -> int:
    """Read until the block is full or the file ends."""
    have = 0
    while have < len(block):
        count = file.readinto(block.data[have:])  # type: ignore[attr-defined]
        if not count:
            break
        have += count
    return have


# -- applying ---------------------------------------------------------------------------------------------------------


def apply(base: Path, patches: Sequence[Path], target: Path) -> tuple[int, str]:
    """Write the file `base` with all patches applied; its (size, sha256). Raises DeltaError if a patch does not fit."""
    block = np.empty(BLOCK, np.uint8)
    size, sha = 0, hashlib.sha256()
    changes = [_blocks(patch) for patch in patches]
    with base.open("rb", buffering=0) as source, target.open("wb") as out:
        while count := _fill(source, block):
            part = block[:count]
            for patch, blocks in zip(patches, changes, strict=True):
                change = next(blocks, b"")
                if len(change) not in (0, count):
                    raise DeltaError(f"{patch}: does not fit {base}")
                if change:
                    np.bitwise_xor(part, np.frombuffer(change, np.uint8), out=part)
            sha.update(part.data)
            out.write(part.data)
            size += count
    return size, sha.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    decompress = zstandard.ZstdDecompressor().decompress
    with path.open("rb") as file:
        while head := file.read(4):
            packed = file.read(int.from_bytes(head, "little"))
            try:
                yield decompress(packed, max_output_size=BLOCK) if packed else b""
            except zstandard.ZstdError as error:
                raise DeltaError(f"{path}: is damaged ({error})") from error
