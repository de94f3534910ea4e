"""The C library's allocator, told to keep what is freed.

glibc gives every block above 128 KiB, and all that is free at the heap's end, back to the kernel at once. A group's message is
just above that, so each one would pay for fresh pages: on the benchmark's messages encoding was twice as expensive. Where the
library is another one nothing happens.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE_BYTES = 32 << 20
"""glibc's own upper limit for the second, which it reaches by itself in processes that free blocks of that size."""


def give_back_freed_blocks() -> None:
    """All that is free goes back to the kernel now: for a process that makes room for others."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_blocks() -> None:
    """Blocks below 32 MiB come from the heap, whose free end is kept up to twice that. Once, at the start of a process."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_TRIM_THRESHOLD, 2 * LARGE_BYTES)
