"""A copy of the weights, made while training stands still for a moment: everything later works on the copy.

The tensors lie one after another in flat uint8 buckets of about `dcs.bucket_mb`, each bucket of one dtype, so that a bucket
is broadcast as it is and every tensor in it is aligned. Buckets are host memory and are used again for the next version, or
segments of shared memory, new ones for each version (services/dcs/segments.py). Beside a bucket there may be the same in a GPU's
memory, for engines to map (services/dcs/device_memory.py). Each tensor is hashed as soon as it is copied, in other threads. What
others have to know of a copy is its `Outline`; `manifest_of` puts those of all senders together.
tests/dcs/test_publisher.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, Self

import torch

from services.dcs import snapshots
from services.dcs.device_memory import DeviceMemory, give_back
from services.dcs.digest import TensorSpec, checksum, digest, dtype_name
from services.dcs.handles import Place
from services.dcs.segments import Segment

HASHERS = min(4, os.cpu_count() or 1)


@dataclass(slots=True)
class Bucket:
    """Tensors of one dtype, without gaps."""

    dtype: torch.dtype
    buffer: torch.Tensor
    used: int = 0
    indices: list[int] = field(default_factory=list)
    segment: Segment | None = None
    """What the buffer lies in, if others are to take it from there."""
    on_device: DeviceMemory | None = None
    """The same once more, for others to take."""

    @property
    def data(self) -> torch.Tensor:
        return self.buffer[: self.used]

    @property
    def place(self) -> Place:
        """Where others find it."""
        if self.segment is not None:
            return self.segment.name
        assert self.on_device is not None
        assert self.on_device.handle is not None
        return self.on_device.handle.fields()


@dataclass(frozen=True, slots=True)
class Outline:
    """A copy without its bytes."""

    specs: list[TensorSpec]
    buckets: list[list[int]]
    """Indices into `specs`, bucket by bucket."""
    nbytes: list[int]
    """Of each bucket."""
    copy_s: float
    checksum_s: float
    """What hashing took beyond the copying."""

    def plain(self) -> dict[str, Any]:
        """As a message."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self:
        specs = [TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in plain["specs"]]
        return cls(**{**plain, "specs": specs})


@dataclass(slots=True)
class Copy:
    """The weights of one version, or a sender's part of them."""

    outline: Outline
    buckets: list[Bucket]

    def unshare(self) -> None:
        """Nobody else will take it any more. It stays readable here."""
        _unshare(self.buckets)


def _unshare(buckets: Sequence[Bucket]) -> None:
    for bucket in buckets:
        if bucket.segment is not None:
            bucket.segment.close()
        if bucket.on_device is not None:
            bucket.on_device.close()
    if any(bucket.on_device is not None for bucket in buckets):
        give_back()


class Copier:
    """Owns the buffers. One copy is in use at a time: `copy` overwrites the last one."""

    def __init__(self, bucket_bytes: int, segments: Callable[[], str] | None = None, device: str | None = None) -> None:
        """`segments` gives names: each bucket is then shared memory of that name. On a `device` each is once more."""
        self._bucket_bytes = bucket_bytes
        self._segments, self._device = segments, device
        self._spare: list[torch.Tensor] = []

    def copy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Copy:
        """Raises SegmentError if there is too little memory to share, or it cannot be shared."""
        buckets: list[Bucket] = []
        try:
            copy = self._copy(tensors, buckets)
            for bucket in buckets:
                if bucket.on_device is not None:
                    bucket.on_device.share()
            return copy
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
                if bucket.on_device is not None:
                    bucket.on_device.write(bucket.used, tensor)
                bucket.used += size
                bucket.indices.append(len(found))
                found.append((name, dtype_name(tensor), tuple(tensor.shape), hashers.submit(checksum, part.numpy())))
            copied = time.monotonic()
            specs = [TensorSpec(name, dtype, shape, sha.result()) for name, dtype, shape, sha in found]
        self._spare = [bucket.buffer for bucket in buckets if bucket.segment is None]
        indices, nbytes = [bucket.indices for bucket in buckets], [bucket.used for bucket in buckets]
        return Copy(Outline(specs, indices, nbytes, copied - started, time.monotonic() - copied), buckets)

    def _bucket(self, dtype: torch.dtype, size: int, spare: list[torch.Tensor]) -> Bucket:
        wanted = max(size, self._bucket_bytes)
        if self._segments is not None:
            segment = Segment(self._segments(), wanted)
            return Bucket(dtype, torch.frombuffer(segment.memory, dtype=torch.uint8), segment=segment)
        on_device = None if self._device is None else DeviceMemory(wanted, self._device)
        for index, buffer in enumerate(spare):
            if len(buffer) == wanted:
                return Bucket(dtype, spare.pop(index), on_device=on_device)
        return Bucket(dtype, torch.empty(wanted, dtype=torch.uint8, device="cpu"), on_device=on_device)


def manifest_of(
    outlines: Sequence[Outline], version: int, step: int, files: Sequence[snapshots.FileEntry] = ()
) -> snapshots.Manifest:
    """What identifies these copies, one of each sender, together as version `version`. Raises ManifestError if two have a tensor
    of the same name. The senders take turns, bucket by bucket: none waits for longer than the others' buckets take."""
    specs = [spec for outline in outlines for spec in outline.specs]
    first, queues = 0, []
    for number, outline in enumerate(outlines):
        queues.append([(number, [first + index for index in bucket]) for bucket in outline.buckets])
        first += len(outline.specs)
    turns = [turn for row in zip_longest(*queues) for turn in row if turn is not None]
    sent_by = [number for number, _ in turns] if len(outlines) > 1 else []
    return snapshots.Manifest(
        version, step, digest(specs), list(files), specs, [bucket for _, bucket in turns], sent_by
    )
