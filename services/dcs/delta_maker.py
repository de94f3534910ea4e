"""Makes deltas in the background, after versions were announced, so that nobody who publishes or receives waits for it.

Owns <root>/deltas. Lost work is harmless: without a delta the snapshot is pulled. tests/dcs/test_pulling.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from services.dcs import deltas, snapshots
from services.dcs.deltas import Delta
from services.dcs.snapshots import Manifest, SnapshotError
from shared.metrics import Events

log = logging.getLogger(__name__)


class DeltaMaker:
    """`keep` newest deltas; 0: none are made."""

    def __init__(self, root: Path, keep: int, events: Events) -> None:
        self._root, self._keep, self._events = root, keep, events
        self._making: dict[int, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

    def start(self, base: int, new: Manifest) -> None:
        """The delta from version `base` is wanted. Asking again changes nothing."""
        made = deltas.folder(self._root, base, new.version)
        if self._keep and new.version not in self._making and not made.exists():
            self._making[new.version] = asyncio.create_task(self._make(base, new))

    async def _make(self, base: int, new: Manifest) -> None:
        try:
            async with self._turn:
                started = time.monotonic()
                delta = await asyncio.to_thread(self._write, base, new)
                log.info(
                    "delta %d -> %d: %s, %.2f s", base, new.version, delta and delta.size, time.monotonic() - started
                )
        except (SnapshotError, OSError) as error:
            text = f"from version {base} to {new.version}: {error}; who needs it pulls the snapshot"
            await self._events.publish("delta_failed", text, version=new.version)
        finally:
            del self._making[new.version]

    def _write(self, base: int, new: Manifest) -> Delta | None:
        before = snapshots.read(self._root, base)
        delta = None if before is None else deltas.make(self._root, before, new)
        deltas.prune(self._root, self._keep)
        return delta

    async def leading_to(self, version: int, wait_s: float) -> list[Delta]:
        """Those that may lead to `version`, once what is being made is there or the time is up."""
        making = [task for number, task in self._making.items() if number <= version]
        if making:
            await asyncio.wait(making, timeout=wait_s)
        found = await asyncio.to_thread(deltas.known, self._root)
        return [delta for delta in found if delta.version <= version]

    async def close(self) -> None:
        for task in self._making.values():
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
