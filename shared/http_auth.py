"""The token of the services' HTTP interfaces: who asks for it, and who sends it.

Guarantees: an interface that other machines can reach answers nobody without the token, /health excepted, and does not start
without one; on loopback none is asked for. A missing and a wrong token are told apart. tests/shared/test_http_auth.py.

The token is `SLIPSTREAM_TOKEN`, or in the file `token` of the folder `SLIPSTREAM_CREDENTIALS`, for servers and clients alike. It
may be several: a server takes any of them, a client sends the first.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from shared.config import ConfigError
from shared.credentials import CREDENTIALS, folder
from shared.network import is_loopback

TOKEN = "SLIPSTREAM_TOKEN"
OPEN_PATHS = ("/health",)
"""Answered without a token: they tell nothing but that the service lives, to whatever watches containers."""
MISSING = (
    f"this interface asks for a token: send it as `Authorization: Bearer TOKEN`; our own tools take it from {TOKEN}"
)
WRONG = f"the token is not the one of this service: compare {TOKEN} here and there"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def tokens() -> list[str]:
    """This process's tokens. Raises ConfigError if their file cannot be read."""
    if found := os.environ.get(TOKEN, "").split():
        return found
    place = folder()
    file = place / "token" if place is not None else None
    try:
        return file.read_text().split() if file is not None and file.exists() else []
    except OSError as error:
        raise ConfigError(f"{CREDENTIALS}: cannot read {file} ({error.strerror})") from error


def headers() -> dict[str, str]:
    """What a client sends along."""
    return {"Authorization": f"Bearer {found[0]}"} if (found := tokens()) else {}


def guard(app: App, host: str, field: str) -> App:
    """`app` behind the token if `host`, of the run file's section `field`, is seen from other machines. Raises ConfigError
    if there is none then."""
    if is_loopback(host):
        return app
    if not (expected := tokens()):
        raise ConfigError(
            f"{field}.host: {host} can be reached from other machines, so its interface needs a token: set {TOKEN} to a long "
            "random text, the same for all services and tools of the run, or bind it to 127.0.0.1"
        )
    return _Guard(app, expected)


class _Guard:
    """ASGI, so that bodies stream through untouched."""

    def __init__(self, app: App, expected: list[str]) -> None:
        self._app, self._expected = app, [one.encode() for one in expected]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope.get("path") not in OPEN_PATHS and (problem := self._problem(scope)):
            return await _refuse(scope, send, problem)
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> str:
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        kind, _, value = given.partition(b" ")
        if kind.lower() != b"bearer" or not value.strip():
            return MISSING
        return "" if any(hmac.compare_digest(value.strip(), one) for one in self._expected) else WRONG


async def _refuse(scope: Scope, send: Send, problem: str) -> None:
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008, "reason": problem[:120]})
    body = json.dumps({"detail": problem}).encode()
    kind = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": kind})
    await send({"type": "http.response.body", "body": body})
