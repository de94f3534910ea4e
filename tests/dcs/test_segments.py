"""Shared memory for weights: what one writes another reads, too little of it is an error, and nothing of a run stays behind."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.dcs import segments
from services.dcs.segments import Segment, SegmentError
from services.trainer.weight_copy import Copier, manifest_of
from tests.dcs.conftest import weights


@pytest.fixture
def prefix() -> Iterator[str]:
    made = segments.prefix(uuid.uuid4().hex, "/runs")
    yield made
    segments.sweep(made)


def test_what_is_written_is_read_also_after_the_name_is_gone(prefix: str) -> None:
    segment = Segment(f"{prefix}a", 1 << 20)
    segment.reserve(0, 5)
    segment.memory[:5] = b"hello"
    seen = segments.attach(segment.name, 5)
    segment.close()
    segment.close()
    assert seen[:] == b"hello"
    seen[0] = ord("j")  # private to this mapping
    assert segment.memory[:5] == b"hello"
    with pytest.raises(SegmentError, match="is not in .* its trainer is gone"):
        segments.attach(segment.name, 5)


def test_a_name_is_used_once_and_is_one_of_ours(prefix: str) -> None:
    segment = Segment(f"{prefix}a", 10)
    with pytest.raises(FileExistsError):
        Segment(segment.name, 10)
    for name in ("../etc/passwd", "slipstream-/../x", "other"):
        with pytest.raises(SegmentError, match="not a name of ours"):
            segments.attach(name, 1)
    with pytest.raises(SegmentError, match="has 10 bytes, 11 were announced"):
        segments.attach(segment.name, 11)


def test_too_little_memory_is_an_error_with_a_remedy(prefix: str) -> None:
    space = os.statvfs(segments.FOLDER)
    size = space.f_blocks * space.f_frsize * 2
    segment = Segment(f"{prefix}a", size)  # address space costs nothing
    with pytest.raises(SegmentError, match="MiB left, too little for a copy of the weights.*--shm-size"):
        segment.reserve(0, size)


def test_the_sweep_finds_what_a_killed_trainer_left_and_nothing_else(prefix: str) -> None:
    left, kept = Segment(f"{prefix}old-0", 10), Segment(f"{prefix}new-0", 10)
    other = segments.prefix("another", "/runs")
    foreign = Segment(f"{other}{uuid.uuid4().hex}", 10)
    try:
        assert prefix != other
        assert segments.sweep(prefix, keep=[kept.name]) == [left.name]
        assert (segments.FOLDER / kept.name).exists()
        assert (segments.FOLDER / foreign.name).exists()
    finally:
        foreign.close()


def test_a_copy_in_shared_memory_has_the_digest_of_any_other(prefix: str, tmp_path: Path) -> None:
    names = iter(f"{prefix}{number}" for number in range(10))
    shared = Copier(1 << 10, lambda: next(names)).copy(weights(3.0).items())
    plain = Copier(1 << 10).copy(weights(3.0).items())
    assert manifest_of([shared.outline], 1, 0) == manifest_of([plain.outline], 1, 0)
    for mine, other in zip(shared.buckets, plain.buckets, strict=True):
        assert mine.segment is not None
        assert segments.attach(mine.segment.name, mine.used)[:] == other.data.numpy().tobytes()
    shared.unshare()
    assert segments.sweep(prefix) == []
    assert bytes(shared.buckets[0].data.numpy()) == bytes(plain.buckets[0].data.numpy())


def test_a_copy_that_fails_leaves_no_segment(prefix: str) -> None:
    def broken() -> Iterator[tuple[str, object]]:
        yield from list(weights(1.0).items())[:2]
        raise ValueError("a rank is gone")

    names = iter(f"{prefix}{number}" for number in range(10))
    with pytest.raises(ValueError, match="a rank is gone"):
        Copier(1 << 10, lambda: next(names)).copy(broken())  # type: ignore[arg-type]
    assert segments.sweep(prefix) == []
