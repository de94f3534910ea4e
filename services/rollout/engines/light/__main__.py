"""`python -m services.rollout.engines.light --model DIR`: serve until SIGTERM, until the parent dies, or until the model fails.

Prints one line with the URL when ready. Exit code 0 after SIGTERM or SIGINT (what runs is answered with its partial output),
1 when the model's thread died, 2 when the options or the model folder are wrong.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from aiohttp import web

from services.rollout.engines.light.engine import Engine
from services.rollout.engines.light.model import ModelError
from services.rollout.engines.light.options import EngineOptions
from services.rollout.engines.light.server import Server
from shared.allocator import keep_freed_blocks

STOP_TIMEOUT_S = 5.0
PARENT_CHECK_S = 1.0
PR_SET_PDEATHSIG = 1


def main() -> int:
    parent = os.getppid()
    die_with_parent()
    keep_freed_blocks()
    try:
        return run(serve(EngineOptions.parse(), parent))
    except (ModelError, OSError, RuntimeError) as error:
        print(f"light engine: {error}", file=sys.stderr, flush=True)
        return 2


def run(serving: Coroutine[Any, Any, int]) -> int:
    """On uvloop where there is one: less CPU a request."""
    if find_spec("uvloop") is None:
        return asyncio.run(serving)
    import uvloop

    return uvloop.run(serving)


def die_with_parent() -> None:
    """Have Linux kill this process with its parent. `watch_parent` serves elsewhere, and for the gap before this call."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def watch_parent(parent: int, stop: asyncio.Event) -> None:
    while not stop.is_set():
        if os.getppid() != parent:
            stop.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), PARENT_CHECK_S)


async def serve(options: EngineOptions, parent: int) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)

    def on_death() -> None:
        loop.call_soon_threadsafe(stop.set)

    engine = await asyncio.to_thread(Engine.build, options, on_death)
    gc.collect()
    gc.freeze()  # what is loaded stays; answers make many lists, and each collection would look through all of torch
    server = Server(engine)
    runner = web.AppRunner(
        server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=STOP_TIMEOUT_S
    )
    await runner.setup()
    site = web.TCPSite(runner, options.host, options.port, backlog=1024)
    await site.start()
    engine.scheduler.start()
    host, port = runner.addresses[0][:2]
    print(f"light engine ready at http://{host}:{port}", flush=True)
    watch = asyncio.create_task(watch_parent(parent, stop))
    await stop.wait()
    await watch
    await asyncio.to_thread(engine.scheduler.stop, STOP_TIMEOUT_S)
    await server.weights.close()
    await runner.cleanup()
    return 1 if engine.scheduler.failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a transfer stuck in a thread must not hold the process; everything is closed above
