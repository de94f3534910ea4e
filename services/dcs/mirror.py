"""A copy of the snapshots and deltas in an object store (S3 and what speaks its protocol, Google's or Azure's), for who pulls.

    <dcs.store>/<run>/<sha256>      each file of the versions and deltas that the DCS keeps, under what it holds

The DCS copies in the background, and alone has the store's credentials: it answers a download with a redirect to a signed
address once the file is there. Until then, and when the store fails, it sends the file itself. What comes from a store is
verified like everything else. Nothing in here is needed for correctness: `_sync` compares what is there with what should be, so
lost work is done again. Needs the extra `store`. tests/dcs/test_mirror.py, with a real S3 server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from services.dcs import deltas, snapshots
from shared.config import ConfigError
from shared.errors import first_line
from shared.metrics import Events

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, RetryConfig, S3Store

log = logging.getLogger(__name__)

SIGNED_FOR = timedelta(hours=1)
RETRY_S = 10.0
PATIENCE: RetryConfig = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}


class Mirror:
    """`wake` it whenever files came or went; `link` to what it holds."""

    def __init__(self, root: Path, store: AzureStore | GCSStore | S3Store, run: str, events: Events) -> None:
        self._root, self._store, self._run, self._events = root, store, run, events
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._held: dict[str, str] = {}
        """Keys in the store, by the path of the file below the root."""
        self._failing = False

    @classmethod
    def open(cls, url: str, root: Path, run: str, events: Events) -> Mirror:
        """Raises ConfigError. Asks nobody: what the store says is seen by `run`."""
        try:
            from obstore.exceptions import BaseError
            from obstore.store import AzureStore, GCSStore, S3Store
        except ImportError as error:
            raise ConfigError("dcs.store: needs a package: pip install 'slipstream-rl[store]'") from error
        try:
            kinds: dict[str, type[AzureStore | GCSStore | S3Store]] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
            return cls(root, kinds[url.partition(":")[0]].from_url(url, retry_config=PATIENCE), run, events)
        except (BaseError, ValueError) as error:
            raise ConfigError(f"dcs.store: {url}: {first_line(error)}") from error

    def wake(self) -> None:
        self._wanted.set()

    async def link(self, path: str) -> str | None:
        """A signed address of a file, given its path below the root; None: it is not in the store."""
        import obstore
        from obstore.exceptions import BaseError

        key = self._held.get(path)
        if key is None:
            return None
        try:
            return await obstore.sign_async(self._store, "GET", key, SIGNED_FOR)
        except (BaseError, OSError) as error:
            await self._tell(error)
            return None

    async def run(self) -> None:
        """Keep the copy, for ever."""
        from obstore.exceptions import BaseError

        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._sync()
                self._failing = False
            except (BaseError, OSError) as error:
                self._wanted.set()
                await self._tell(error)
                await asyncio.sleep(RETRY_S)

    async def _sync(self) -> None:
        import obstore

        started, sent = time.monotonic(), 0
        wanted = await asyncio.to_thread(self._files)
        there = set()
        async for batch in obstore.list(self._store, prefix=f"{self._run}/"):
            there |= {entry["path"] for entry in batch}
        self._held = {path: key for path, key in self._held.items() if wanted.get(path) == key and key in there}
        for path, key in wanted.items():
            if key not in there:
                file = self._root / path
                if not await asyncio.to_thread(file.is_file):
                    continue  # removed since; whoever removed it wakes us
                await obstore.put_async(self._store, key, file)
                there.add(key)
                sent += 1
            self._held[path] = key
        if old := sorted(there - set(wanted.values())):
            await obstore.delete_async(self._store, old)
        log.info(
            "the store has %d files: %d new, %d gone, %.2f s", len(wanted), sent, len(old), time.monotonic() - started
        )

    def _files(self) -> dict[str, str]:
        """Keys of all that should be there, by path; the newest versions first, for they are pulled most."""
        found: dict[str, str] = {}
        for version in reversed(snapshots.versions(self._root)):
            manifest = snapshots.read(self._root, version)
            for entry in manifest.files if manifest else ():
                found[f"{snapshots.folder(self._root, version).relative_to(self._root)}/{entry.name}"] = self._key(
                    entry
                )
        for delta in reversed(deltas.known(self._root)):
            folder = deltas.folder(self._root, delta.base, delta.version).relative_to(self._root)
            found |= {f"{folder}/{entry.name}": self._key(entry) for entry in delta.files}
        return found

    def _key(self, entry: snapshots.FileEntry) -> str:
        return f"{self._run}/{entry.sha256}"

    async def _tell(self, error: Exception) -> None:
        """Once for each outage."""
        if not self._failing:
            self._failing = True
            text = f"{first_line(error)}; the DCS sends the files itself, and goes on trying"
            await self._events.publish("store_failed", text)
