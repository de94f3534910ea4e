"""For threads that work in the background of a process: they take what its other work leaves of the cores."""

from __future__ import annotations

import os
import sys
import threading

NICE = 10
"""By so much is such a thread nicer than its process."""


def give_way() -> None:
    """Make the calling thread nice, and it alone: only on Linux each has its own niceness, elsewhere nothing happens."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + NICE))
