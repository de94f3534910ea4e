"""A copy of the weights, made while training stands still for a moment: everything later works on the copy.

The tensors lie one after another in flat uint8 buckets of about `dcs.bucket_mb`, each bucket of one dtype, so that a bucket
is broadcast as it is and every tensor in it is aligned. Buckets are host memory and are used again for the next version, or
segments of shared memory, new ones for each version (services/dcs/segments.py). Each tensor is hashed as soon as it is copied, in
other threads. `write_snapshot` makes the Hugging Face folder of it.
tests/dcs/test_publisher.py.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from services.dcs import snapshots
from services.dcs.digest import TensorSpec, checksum, digest, dtype_name
from services.dcs.segments import Segment
from services.trainer.model_folder import COPIED_FILES
from services.trainer.tensorfile import Spec, TensorWriter

HASHERS = min(4, os.cpu_count() or 1)
SHARD_BYTES = 4 << 30
"""A weights file of a snapshot is about this large at most."""


@dataclass(slots=True)
class Bucket:
    """Tensors of one dtype, without gaps."""

    dtype: torch.dtype
    buffer: torch.Tensor
    used: int = 0
    indices: list[int] = field(default_factory=list)
    segment: Segment | None = None
    """What the buffer lies in, if others are to take it from there."""

    @property
    def data(self) -> torch.Tensor:
        return self.buffer[: self.used]


@dataclass(slots=True)
class Copy:
    """The weights of one version."""

    specs: list[TensorSpec]
    buckets: list[Bucket]
    copy_s: float
    checksum_s: float
    """What hashing took beyond the copying."""

    @property
    def digest(self) -> str:
        return digest(self.specs)

    @property
    def nbytes(self) -> int:
        return sum(bucket.used for bucket in self.buckets)

    def unshare(self) -> None:
        """Nobody else will take it any more. It stays readable here."""
        _unshare(self.buckets)


def _unshare(buckets: Iterable[Bucket]) -> None:
    for bucket in buckets:
        if bucket.segment is not None:
            bucket.segment.close()


class Copier:
    """Owns the buffers. One copy is in use at a time: `copy` overwrites the last one."""

    def __init__(self, bucket_bytes: int, segments: Callable[[], str] | None = None) -> None:
        """`segments` gives names: each bucket is then shared memory of that name."""
        self._bucket_bytes = bucket_bytes
        self._segments = segments
        self._spare: list[torch.Tensor] = []

    def copy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Copy:
        """Raises SegmentError if there is too little shared memory."""
        buckets: list[Bucket] = []
        try:
            return self._copy(tensors, buckets)
        except BaseException:
            _unshare(buckets)
            raise

    def _copy(self, tensors: Iterable[tuple[str, torch.Tensor]], buckets: list[Bucket]) -> Copy:
        started = time.monotonic()
        filling: dict[torch.dtype, Bucket] = {}
        found: list[tuple[str, str, tuple[int, ...], Future[str]]] = []
        spare, self._spare = self._spare, []
        with ThreadPoolExecutor(HASHERS, thread_name_prefix="checksum") as hashers:
            for name, tensor in tensors:
                size = tensor.numel() * tensor.element_size()
                bucket = filling.get(tensor.dtype)
                if bucket is None or bucket.used + size > len(bucket.buffer):
                    bucket = filling[tensor.dtype] = self._bucket(tensor.dtype, size, spare)
                    buckets.append(bucket)
                if bucket.segment is not None:
                    bucket.segment.reserve(bucket.used, size)
                part = bucket.buffer[bucket.used : bucket.used + size]
                part.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
                bucket.used += size
                bucket.indices.append(len(found))
                found.append((name, dtype_name(tensor), tuple(tensor.shape), hashers.submit(checksum, part.numpy())))
            copied = time.monotonic()
            specs = [TensorSpec(name, dtype, shape, sha.result()) for name, dtype, shape, sha in found]
        self._spare = [bucket.buffer for bucket in buckets if bucket.segment is None]
        return Copy(specs, buckets, copied - started, time.monotonic() - copied)

    def _bucket(self, dtype: torch.dtype, size: int, spare: list[torch.Tensor]) -> Bucket:
        wanted = max(size, self._bucket_bytes)
        if self._segments is not None:
            segment = Segment(self._segments(), wanted)
            return Bucket(dtype, torch.frombuffer(segment.memory, dtype=torch.uint8), segment=segment)
        for index, buffer in enumerate(spare):
            if len(buffer) == wanted:
                return Bucket(dtype, spare.pop(index))
        return Bucket(dtype, torch.empty(wanted, dtype=torch.uint8, device="cpu"))


def write_snapshot(
    copy: Copy, root: Path, model_dir: Path, *, version: int, step: int, owner: str
) -> snapshots.Manifest:
    """Write the copy as version `version` below `root`, complete with config and tokenizer of `model_dir`."""
    part = snapshots.partial(root, version, owner)
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    files = _write_tensors(copy, part)
    for pattern in COPIED_FILES:
        for source in sorted(model_dir.glob(pattern)):
            shutil.copyfile(source, part / source.name)
            files.append(snapshots.FileEntry(source.name, *snapshots.hash_file(part / source.name)))
    manifest = manifest_of(copy, version, step, files)
    snapshots.complete(root, part, manifest)
    return manifest


def manifest_of(copy: Copy, version: int, step: int, files: Sequence[snapshots.FileEntry] = ()) -> snapshots.Manifest:
    """What identifies the copy as version `version`."""
    buckets = [bucket.indices for bucket in copy.buckets]
    return snapshots.Manifest(version, step, copy.digest, list(files), copy.specs, buckets)


def _write_tensors(copy: Copy, part: Path) -> list[snapshots.FileEntry]:
    shards: list[list[Bucket]] = [[]]
    for bucket in copy.buckets:
        if shards[-1] and sum(b.used for b in shards[-1]) + bucket.used > SHARD_BYTES:
            shards.append([])
        shards[-1].append(bucket)
    files: list[snapshots.FileEntry] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        files.append(_write_shard(copy, shard, part / name))
        weight_map |= {copy.specs[index].name: name for bucket in shard for index in bucket.indices}
    if len(shards) > 1:
        index_file = part / "model.safetensors.index.json"
        index_file.write_text(json.dumps({"metadata": {"total_size": copy.nbytes}, "weight_map": weight_map}, indent=1))
        files.append(snapshots.FileEntry(index_file.name, *snapshots.hash_file(index_file)))
    return files


def _write_shard(copy: Copy, shard: list[Bucket], path: Path) -> snapshots.FileEntry:
    listed = [(bucket, copy.specs[index]) for bucket in shard for index in bucket.indices]
    writer = TensorWriter(path, [Spec(spec.name, bucket.dtype, spec.shape) for bucket, spec in listed])
    try:
        for bucket in shard:
            offset = 0
            for index in bucket.indices:
                spec = copy.specs[index]
                writer.write(bucket.data[offset : offset + spec.nbytes].view(bucket.dtype).view(spec.shape))
                offset += spec.nbytes
    except BaseException:
        writer.abort()
        raise
    sha256 = writer.close()
    return snapshots.FileEntry(path.name, writer.nbytes, sha256)
