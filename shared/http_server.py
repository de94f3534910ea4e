"""A small HTTP server inside a service's own event loop: uvicorn without its signal handlers, on a socket bound beforehand.

Binding first means that a taken port is an error at the start, named after the run file's field, and that port 0 has its number
before anybody asks for the URL. `tests/controller/test_controller.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Generator
from typing import Any

import uvicorn

from shared.config import ConfigError

GRACEFUL_S = 2


class Server(uvicorn.Server):
    """The service's life cycle has its own signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. OSError if that cannot be."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def listen(host: str, port: int, field: str) -> socket.socket:
    """A bound socket. ConfigError names `field`, the section that holds host and port."""
    try:
        return bind(host, port)
    except OSError as error:
        raise ConfigError(
            f"{field}.host, {field}.port: cannot listen on {host}:{port} ({error.strerror}); "
            f"set {field}.port to 0 for a free one, or stop what holds it"
        ) from error


@contextlib.asynccontextmanager
async def serving(app: Any, listener: socket.socket) -> AsyncIterator[str]:
    """Serve the ASGI application while the block runs; gives the URL."""
    host, port = listener.getsockname()[:2]
    server = Server(
        uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=GRACEFUL_S, access_log=False)
    )
    task = asyncio.create_task(server.serve([listener]))
    try:
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
        listener.close()
