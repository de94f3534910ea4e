"""Time for decisions that outlive a process: `now()` is the wall clock as it was when the process began, plus the time since.

A wall clock jumps (a time server, a suspended machine, a person); a deadline that is compared with it comes at once or never.
This one only ever goes on, and is close enough to the wall clock to be stored and read by the next process. What does not
outlive a process uses `time.monotonic`; `time.time` is for stamps that people read. tests/chaos/test_faults.py lets clocks jump.
"""

from __future__ import annotations

import time

_OFFSET_S = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the epoch, steadily."""
    return time.monotonic() + _OFFSET_S
