"""Makes deltas in the background, once a version's broadcast is over, in a thread that gives way to everything else.

So nobody who publishes or receives by broadcast waits for it; whoever pulls does (`leading_to`). Owns <root>/deltas. Lost work is
harmless: without a delta the snapshot is pulled. tests/dcs/test_pulling.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from services.dcs import deltas, snapshots
from services.dcs.deltas import Delta
from services.dcs.snapshots import Manifest, SnapshotError
from shared.metrics import Events
from shared.niceness import give_way

log = logging.getLogger(__name__)


class DeltaMaker:
    """`keep` newest deltas; 0: none are made. `patience_s`: how long a broadcast may hold one up. `made` is called for each."""

    def __init__(
        self, root: Path, keep: int, events: Events, patience_s: float, made: Callable[[], None] = lambda: None
    ) -> None:
        self._root, self._keep, self._events, self._patience_s, self._made = root, keep, events, patience_s, made
        self._making: dict[int, asyncio.Task[None]] = {}
        self._over: dict[int, asyncio.Event] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="deltas", initializer=give_way)

    def expect(self, base: int, new: Manifest) -> None:
        """The delta from version `base` is wanted, once the broadcast of `new` is over. Asking again changes nothing."""
        made = deltas.folder(self._root, base, new.version)
        if self._keep and new.version not in self._making and not made.exists():
            self._over[new.version] = asyncio.Event()
            self._making[new.version] = asyncio.create_task(self._make(base, new))

    def broadcast_over(self, version: int) -> None:
        if version in self._over:
            self._over[version].set()

    async def _make(self, base: int, new: Manifest) -> None:
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over[new.version].wait(), self._patience_s)
            started = time.monotonic()
            delta = await asyncio.get_running_loop().run_in_executor(self._thread, self._write, base, new)
            log.info("delta %d -> %d: %s, %.2f s", base, new.version, delta and delta.size, time.monotonic() - started)
            self._made()
        except FileNotFoundError as error:  # versions come faster than deltas are made: one of the two was removed
            log.info("no delta %d -> %d: %s is not kept any more", base, new.version, error.filename)
        except (SnapshotError, OSError) as error:
            text = f"from version {base} to {new.version}: {error}; who needs it pulls the snapshot"
            await self._events.publish("delta_failed", text, version=new.version)
        finally:
            del self._making[new.version], self._over[new.version]

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
        self._thread.shutdown(wait=False)
