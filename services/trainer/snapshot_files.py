"""The snapshot of a version: a Hugging Face folder that all senders of the version write together (services/dcs/snapshots.py).

    new = NewSnapshot(...)     who writes which file, and the folder, which is worth nothing yet
    write_shards(...)          each sender, of its copy
    new.complete(...)          config, tokenizer, index and manifest; the folder gets its name

tests/dcs/test_publisher.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from services.dcs import snapshots
from services.dcs.snapshots import FileEntry, Manifest
from services.trainer.model_folder import COPIED_FILES
from services.trainer.tensorfile import Spec, TensorWriter
from services.trainer.weight_copy import Bucket, Copy, Outline, manifest_of

SHARD_BYTES = 4 << 30
"""A weights file is about this large at most."""
INDEX = "model.safetensors.index.json"

Shards = dict[str, list[int]]
"""The files of one sender: name -> numbers of its buckets."""


class NewSnapshot:
    """Version `version` on its way, below `root`. `owner` tells it from another process's."""

    def __init__(self, root: Path, outlines: Sequence[Outline], *, version: int, step: int, owner: str) -> None:
        self._root, self._outlines, self._version, self._step = root, outlines, version, step
        self.shards = plan(outlines)
        """Of each sender."""
        self.folder = snapshots.partial(root, version, owner)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)

    def complete(self, model_dir: Path, written: Sequence[FileEntry]) -> Manifest:
        """All weights are `written`: add what else belongs to a model, as in `model_dir`."""
        files = [*written, *self._index()]
        for pattern in COPIED_FILES:
            for source in sorted(model_dir.glob(pattern)):
                shutil.copyfile(source, self.folder / source.name)
                files.append(self._entry(source.name))
        manifest = manifest_of(self._outlines, self._version, self._step, files)
        snapshots.complete(self._root, self.folder, manifest)
        return manifest

    def _index(self) -> list[FileEntry]:
        if sum(map(len, self.shards)) < 2:
            return []
        weight_map = {
            outline.specs[index].name: name
            for outline, shards in zip(self._outlines, self.shards, strict=True)
            for name, numbers in shards.items()
            for number in numbers
            for index in outline.buckets[number]
        }
        total = sum(sum(outline.nbytes) for outline in self._outlines)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=1))
        return [self._entry(INDEX)]

    def _entry(self, name: str) -> FileEntry:
        return FileEntry(name, *snapshots.hash_file(self.folder / name))


def plan(outlines: Sequence[Outline]) -> list[Shards]:
    """Which file holds which buckets, sender by sender."""
    runs: list[list[list[int]]] = []
    for outline in outlines:
        mine: list[list[int]] = [[]]
        for number, nbytes in enumerate(outline.nbytes):
            if mine[-1] and sum(outline.nbytes[n] for n in mine[-1]) + nbytes > SHARD_BYTES:
                mine.append([])
            mine[-1].append(number)
        runs.append(mine)
    count, number, found = sum(map(len, runs)), 0, []
    for mine in runs:
        shards: Shards = {}
        for numbers in mine:
            number += 1
            name = "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            shards[name] = numbers
        found.append(shards)
    return found


def write_shards(copy: Copy, folder: Path, shards: Shards) -> list[FileEntry]:
    """A sender's files. Raises OSError, DiskFullError."""
    return [_write(copy, [copy.buckets[n] for n in numbers], folder / name) for name, numbers in shards.items()]


def _write(copy: Copy, buckets: list[Bucket], path: Path) -> FileEntry:
    specs = copy.outline.specs
    listed = [(bucket, specs[index]) for bucket in buckets for index in bucket.indices]
    writer = TensorWriter(path, [Spec(spec.name, bucket.dtype, spec.shape) for bucket, spec in listed])
    try:
        for bucket in buckets:
            offset = 0
            for index in bucket.indices:
                spec = specs[index]
                writer.write(bucket.data[offset : offset + spec.nbytes].view(bucket.dtype).view(spec.shape))
                offset += spec.nbytes
    except BaseException:
        writer.abort()
        raise
    sha256 = writer.close()
    return FileEntry(path.name, writer.nbytes, sha256)
