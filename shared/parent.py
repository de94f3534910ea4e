"""Dying with the parent: no service of `slipstream up` outlives it, whatever ends it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, is gone. Exits at once if it is gone already.

    SIGKILL, as nothing is lost by it (work in flight is delivered again) and nothing can hold it up. Linux only; elsewhere the
    parent's own SIGTERM has to do.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died between the fork and the call above
        raise SystemExit(f"slipstream: the process {parent} that started this one is gone")
