"""Weights in memory that trainer and engines of one host share: a file in a file system that is memory, mapped by both.

The trainer creates a segment for each bucket of a version and copies the tensors into it; an engine maps it, copies from it and
verifies what it copied, as on every other way. Guarantees: memory is reserved before it is written, so that a full /dev/shm is an
error with a remedy and no SIGBUS; what a mapping shows outlives the segment's name, so removing it takes nothing from who is
reading; names carry the run and its work folder, so that `sweep` finds what killed trainers left, and nothing of other runs.
tests/dcs/test_segments.py.
"""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
NAME = re.compile(r"slipstream-[-_.A-Za-z0-9]+")


class SegmentError(RuntimeError):
    """A segment cannot be made or found. The text says what to do."""


class Segment:
    """Shared memory under a name, owned by who created it."""

    def __init__(self, name: str, size: int) -> None:
        """`size` bytes of address space; memory is taken by `reserve`."""
        self.name, self.size = _checked(name), size
        self._fd = os.open(FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(self._fd, size)
            self.memory = mmap.mmap(self._fd, size)
        except OSError:
            self.close()
            raise

    def reserve(self, start: int, size: int) -> None:
        """Take the memory of a part that is about to be written. Raises SegmentError if there is none."""
        if size == 0:
            return
        try:
            os.posix_fallocate(self._fd, start, size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            space = os.statvfs(FOLDER)
            free = space.f_bavail * space.f_frsize
            raise SegmentError(
                f"{FOLDER} has {free >> 20} MiB left, too little for a copy of the weights, which placement: colocate hands "
                "over there; make it larger (docker run --shm-size, or mount -o remount,size=...)"
            ) from error

    def close(self) -> None:
        """Remove the name. Mappings stay valid, and the memory is free when the last one is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            (FOLDER / self.name).unlink(missing_ok=True)


def attach(name: str, size: int) -> mmap.mmap:
    """The first `size` bytes of somebody's segment. What is written into the mapping stays private to it."""
    try:
        with (FOLDER / _checked(name)).open("rb") as file:
            if (there := os.fstat(file.fileno()).st_size) < size:
                raise SegmentError(f"segment {name}: has {there} bytes, {size} were announced")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise SegmentError(
            f"segment {name}: is not in {FOLDER} (any more): its trainer is gone, or is on another host"
        ) from error


def prefix(run: str, workdir: str) -> str:
    """Begins the names of a run's segments, and of no other's."""
    key = hashlib.sha256(f"{os.getuid()}\0{run}\0{workdir}".encode()).hexdigest()[:16]
    return f"slipstream-{key}-"


def sweep(prefix: str, keep: Iterable[str] = ()) -> list[str]:
    """Remove the segments of a run, but for those to `keep`. Which were removed."""
    kept, gone = set(keep), []
    for path in sorted(FOLDER.glob(f"{prefix}*")):
        if path.name not in kept:
            path.unlink(missing_ok=True)
            gone.append(path.name)
    return gone


def _checked(name: str) -> str:
    if not NAME.fullmatch(name):
        raise SegmentError(f"segment {name!r}: not a name of ours")
    return name
