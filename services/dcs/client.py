"""Speaks to the DCS: publishers, receivers and tools use this and nothing else.

Finds the DCS through the run's KV bucket anew whenever it does not answer, so it follows one that was restarted elsewhere.
Every call has a deadline. `Refused` is the DCS's no and final; `DcsUnavailable` means try again, which is always safe: every
call is idempotent. A token that the DCS does not take is a ConfigError. Torch-free. tests/dcs/test_service.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp

from services.dcs.deltas import Delta
from services.dcs.snapshots import CHUNK, MANIFEST, Manifest
from services.dcs.state import STATE_KEY, Meeting, State
from shared import http_auth
from shared.config import ConfigError
from shared.errors import TransportError
from shared.kv import KV

log = logging.getLogger(__name__)

T = TypeVar("T")

CALL_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
DELTA_WAIT_S = 20.0
"""For a delta that is being made: its version was announced moments ago."""
SILENCE_TIMEOUT_S = 30.0
"""A transfer in which nothing arrives for so long is broken off."""
PROMPT = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)
PATIENT = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_TIMEOUT_S)
RETRY_S = (0.1, 0.2, 0.5, 1.0)
REDIRECT = 307


class Refused(RuntimeError):
    """The DCS said no. `status` is the HTTP status; repeating the call unchanged is of no use."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class DcsUnavailable(RuntimeError):
    """The DCS does not answer, or has not started yet. The call may be repeated."""


class DcsClient:
    """`async with DcsClient(ctx.kv) as dcs`, or `close()` it."""

    def __init__(self, kv: KV) -> None:
        self._kv = kv
        self._url = ""
        self._session: aiohttp.ClientSession | None = None
        self._tried: set[str] = set()
        """What the object store was asked for. Whoever asks again got less than the file, or other bytes."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- publisher ----------------------------------------------------------------------------------------------------

    async def allocate(self, *, publisher: str, step: int, digest: str, reason: str) -> dict[str, Any]:
        body = {"publisher": publisher, "step": step, "digest": digest, "reason": reason}
        return await self._json("POST", "/versions", body)

    async def announce(
        self,
        version: int,
        *,
        publisher: str,
        epoch: int,
        senders: Sequence[Meeting],
        offer: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        body = {"publisher": publisher, "epoch": epoch, "senders": [asdict(one) for one in senders]}
        body |= {} if offer is None else {"offer": offer}
        return await self._json("POST", f"/versions/{version}/announce", body)

    async def result(
        self, version: int, *, publisher: str, ok: bool, error: str, seconds: dict[str, float], wait_s: float = 0.0
    ) -> dict[str, Any]:
        """Tells how the broadcast went and returns the version's course, as `version` does."""
        body = {"publisher": publisher, "ok": ok, "error": error, "seconds": seconds}
        return await self._json("POST", f"/versions/{version}/result?wait_s={wait_s}", body)

    async def upload(self, version: int, folder: Path, manifest: Manifest) -> None:
        """Send a snapshot to a DCS that does not see this host's disk."""
        for name in [entry.name for entry in manifest.files] + [MANIFEST]:
            await self._call(
                "PUT", f"/versions/{version}/files/{name}", lambda _: _nothing(), data=folder / name, moves_bytes=True
            )

    # -- receiver -----------------------------------------------------------------------------------------------------

    async def latest(self) -> dict[str, Any]:
        """The newest version that can be pulled. Refused with status 404 if there is none yet."""
        return await self._json("GET", "/versions/latest")

    async def join(self, replica: str, *, incarnation: str, world_size: int) -> None:
        body = {"replica": replica, "incarnation": incarnation, "world_size": world_size}
        await self._json("POST", "/members", body)

    async def leave(self, replica: str, *, incarnation: str, gone: bool) -> int:
        """Returns the version whose broadcast still counts on this member, 0 if none does."""
        answer = await self._json("DELETE", f"/members/{replica}?incarnation={incarnation}&gone={str(gone).lower()}")
        return int(answer["awaited"])

    async def manifest(self, version: int) -> Manifest:
        async def read(response: aiohttp.ClientResponse) -> Manifest:
            return Manifest.load(await response.read())

        return await self._call("GET", f"/versions/{version}/files", read)

    async def download(self, version: int, name: str, into: Path, size: int) -> None:
        """Append to `into` what is missing of the file."""
        await self._download(f"/versions/{version}/files/{name}", into, size)

    async def deltas(self, version: int) -> list[Delta]:
        """All that may lead to the version; waits for one that is being made."""
        found = await self._json("GET", f"/versions/{version}/deltas?wait_s={DELTA_WAIT_S}")
        return [Delta.of(fields) for fields in found]

    async def download_delta(self, delta: Delta, name: str, into: Path, size: int) -> None:
        await self._download(f"/versions/{delta.version}/deltas/{delta.base}/{name}", into, size)

    async def _download(self, path: str, into: Path, size: int) -> None:
        async def read(response: aiohttp.ClientResponse) -> str:
            if response.status == REDIRECT:
                return response.headers["Location"]
            await _append(response, into)
            return ""

        if path not in self._tried:
            elsewhere = await self._call("GET", path, read, headers=_missing(into, size), moves_bytes=True)
            if not elsewhere:
                return
            self._tried.add(path)
            if await self._from_store(elsewhere, into, size):
                return
        await self._call("GET", f"{path}?direct=true", read, headers=_missing(into, size), moves_bytes=True)

    async def _from_store(self, url: str, into: Path, size: int) -> bool:
        """False: the store does not give it. Its address is a secret."""
        try:
            async with self._open().get(url, headers=_missing(into, size), timeout=PATIENT) as response:
                if response.status < 400:
                    await _append(response, into)
                    return True
                problem = f"HTTP {response.status}"
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            problem = str(error) or type(error).__name__
        log.warning(
            "%s: the object store at %s gives no answer (%s); asking the DCS", into.name, urlsplit(url).netloc, problem
        )
        return False

    # -- anyone -------------------------------------------------------------------------------------------------------

    async def version(self, version: int, wait_s: float = 0.0) -> dict[str, Any]:
        """Its course; with `wait_s`, once it is settled or the time is up."""
        return await self._json("GET", f"/versions/{version}?wait_s={wait_s}")

    async def members(self) -> list[dict[str, Any]]:
        return await self._json("GET", "/members")

    async def pin(self, version: int, wanted: bool = True) -> list[int]:
        """Keep a snapshot, or no longer. Returns all versions that are kept so."""
        return (await self._json("PUT" if wanted else "DELETE", f"/versions/{version}/pin"))["pins"]

    async def resync(self, replica: str) -> dict[str, Any]:
        """Have a replica (`*`: all) fetch the newest version anew."""
        return await self._json("POST", f"/members/{replica}/resync")

    async def roll_back(self, version: int) -> dict[str, Any]:
        """Ask the trainer to go on from this version's weights."""
        return await self._json("POST", f"/versions/{version}/rollback")

    async def host(self) -> str:
        """Where the DCS is, so that a publisher can tell under which address it is seen from there."""
        return urlsplit(await self._find()).hostname or "127.0.0.1"

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return await self._call(method, path, lambda response: response.json(), json=body)

    async def _call(
        self,
        method: str,
        path: str,
        read: Callable[[aiohttp.ClientResponse], Awaitable[T]],
        *,
        json: dict[str, Any] | None = None,
        data: Path | None = None,
        headers: dict[str, str] | None = None,
        moves_bytes: bool = False,
    ) -> T:
        url = await self._find()
        session = self._open()
        body = _file_chunks(data) if data else None
        try:
            async with session.request(
                method,
                url + path,
                json=json,
                data=body,
                headers=http_auth.headers() | (headers or {}),
                timeout=PATIENT if moves_bytes else PROMPT,
                allow_redirects=False,
            ) as response:
                if response.status >= 400:
                    await _refuse(f"{method} {url}{path}", response)
                return await read(response)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            self._url = ""  # it may have moved
            raise DcsUnavailable(f"{method} {url}{path}: no answer ({error or type(error).__name__})") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No kept connection: a restarted DCS on the same port must not be met with the old one's.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        return self._session

    async def _find(self) -> str:
        if not self._url:
            try:
                entry = await self._kv.get(STATE_KEY)
            except TransportError as error:
                raise DcsUnavailable(f"cannot look up the DCS: {error}") from error
            self._url = State.load(entry[0]).url if entry else ""
        if not self._url:
            raise DcsUnavailable("no DCS has started yet")
        return self._url


async def persist(call: Callable[[], Awaitable[T]], pause: Callable[[float], Awaitable[bool]]) -> T:
    """Repeat `call` while the DCS is unavailable. `pause(seconds)` waits and says whether to go on."""
    tries, told = 0, 0.0
    while True:
        try:
            return await call()
        except DcsUnavailable as error:
            if time.monotonic() - told > 10:
                log.warning("%s; trying again", error)
                told = time.monotonic()
            if not await pause(RETRY_S[min(tries, len(RETRY_S) - 1)]):
                raise
            tries += 1


async def _refuse(call: str, response: aiohttp.ClientResponse) -> None:
    text = (await response.text())[:2000]
    if response.status == 401:
        raise ConfigError(f"{call}: {text}")
    if response.status >= 500:
        raise DcsUnavailable(f"{call}: HTTP {response.status}: {text}")
    raise Refused(response.status, f"{call}: HTTP {response.status}: {text}")


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The body in large pieces, so that writing them in a thread costs little."""
    piece = bytearray()
    async for data in response.content.iter_any():
        piece += data
        if len(piece) >= CHUNK:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def _missing(into: Path, size: int) -> dict[str, str]:
    """The header that asks for the rest of a file."""
    have = into.stat().st_size if into.exists() else 0
    return {"Range": f"bytes={have}-"} if 0 < have < size else {}


async def _append(response: aiohttp.ClientResponse, into: Path) -> None:
    """What was asked for, or all of it if the server does not know ranges."""
    with into.open("ab" if "Content-Range" in response.headers else "wb") as file:
        async for chunk in _chunks(response):
            await asyncio.to_thread(file.write, chunk)


async def _file_chunks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := await asyncio.to_thread(file.read, CHUNK):
            yield chunk


async def _nothing() -> None:
    return None
