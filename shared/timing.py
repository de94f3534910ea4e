"""How long the parts of something took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note the time that the body takes, also of one that fails."""
    started = time.monotonic()
    try:
        yield
    finally:
        seconds[name] = time.monotonic() - started
