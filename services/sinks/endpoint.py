"""`/metrics` over HTTP, for Prometheus. tests/sinks/test_follow.py scrapes it.

Also serves `/health`. Behind the run's token where other machines reach it (shared/http_auth.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from services.controller.attach import Run
from services.sinks.follow import Follower, Position
from services.sinks.prometheus import CONTENT_TYPE, Exposition
from shared.errors import TransportError
from shared.http_auth import guard
from shared.http_server import listen, serving
from shared.network import http_url

log = logging.getLogger(__name__)

DEPTHS_S = 5.0
SECTION = "sink prometheus"
Message = MutableMapping[str, Any]


class Endpoint:
    """The ASGI application."""

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] != "http":
            return
        answers = {"/metrics": (200, self._exposition.render), "/health": (200, lambda: "ok\n")}
        status, body = answers.get(scope["path"], (404, lambda: "this is /metrics\n"))
        kind = CONTENT_TYPE if scope["path"] == "/metrics" else "text/plain"
        headers = [(b"content-type", kind.encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body().encode()})


async def serve_metrics(run: Run, host: str, port: int, say: Callable[[str], None]) -> None:
    """Until the run is over. Raises ConfigError if the port is taken."""
    exposition = Exposition(run.name)
    with contextlib.closing(listen(host, port, SECTION)) as listener:
        looking = asyncio.create_task(_look(run, exposition))
        try:
            async with serving(guard(Endpoint(exposition), host, SECTION), listener):
                say(http_url(listener, run.url))
                await Follower(run, exposition, Position()).follow()
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


async def _look(run: Run, exposition: Exposition) -> None:
    """At the queues, for ever."""
    while True:
        try:
            exposition.note(await run.queue.depths())
        except TransportError as error:
            log.debug("the queues cannot be looked at: %s", error)
        await asyncio.sleep(DEPTHS_S)
