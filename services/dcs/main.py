"""The DCS service: it owns which versions of the weights exist, who receives them, and where they can be pulled.

One is active. All that it must remember is in KV and in the snapshot folders, so it may be killed at any moment; the next one
takes the same port if it can. The heartbeat carries its URL. Rules: versions.py; durability: coordinator.py; HTTP: api.py.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from urllib.parse import urlsplit

import uvicorn

from services.dcs import api
from services.dcs.coordinator import Coordinator
from services.dcs.state import STATE_KEY, State
from shared.errors import TransportError
from shared.http_auth import guard
from shared.http_server import Server, bind
from shared.network import http_url
from shared.service import Context, ServiceFailed

log = logging.getLogger(__name__)

TICK_S = 1.0
GRACEFUL_S = 5


async def main(ctx: Context) -> None:
    lease = await ctx.registry.claim("dcs", ctx.replica)
    listener = await _listen(ctx)
    url = http_url(listener, ctx.connection.url)
    coordinator = Coordinator(ctx.config, ctx.queue, ctx.kv, ctx.registry, ctx.events, url)
    await coordinator.restore()
    app = guard(api.build(coordinator), ctx.config.dcs.host, "dcs")
    options = uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=GRACEFUL_S)
    server = Server(options)
    serving = asyncio.create_task(server.serve([listener]))
    folding = asyncio.create_task(coordinator.fold_received())
    tasks = {serving, folding}
    if coordinator.mirror is not None:
        tasks.add(asyncio.create_task(coordinator.mirror.run()))
    try:
        while not ctx.stopping.is_set():
            await _turn(ctx, coordinator)
            await ctx.stop_or(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED), TICK_S)
            for task in tasks:
                if task.done():
                    task.result()
                    raise ServiceFailed(
                        "the HTTP server, the reader of the weights stream or the store's copy ended by itself"
                    )
    finally:
        server.should_exit = True
        for task in tasks - {serving}:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await coordinator.deltas.close()
        await lease.release()


async def _turn(ctx: Context, coordinator: Coordinator) -> None:
    try:
        await coordinator.tick()
    except TransportError as error:
        log.warning("the broker does not answer (%s); deadlines are looked at later", error)
    newest = next(iter(coordinator.announced()), None)
    version, step = (newest.version, newest.step) if newest else (-1, -1)
    await ctx.beat("serving", progress=coordinator.changes, version=version, step=step, url=coordinator.url)
    ctx.metrics.emit(
        step=step if newest else None,
        version=version,
        epoch=coordinator.state.epoch,
        members=len(coordinator.state.members),
        holders=sum(1 for held in coordinator.state.held.values() if held == version),
    )


async def _listen(ctx: Context) -> socket.socket:
    """The configured port, or the one of the last process, or a free one."""
    wanted = ctx.config.dcs.port
    entry = await ctx.kv.get(STATE_KEY)
    earlier = urlsplit(State.load(entry[0]).url).port if entry else None
    if not wanted and earlier:
        try:
            return bind(ctx.config.dcs.host, earlier)
        except OSError as error:
            log.info("port %d of the last process is not free (%s); taking another", earlier, error)
    try:
        return bind(ctx.config.dcs.host, wanted)
    except OSError as error:
        raise ServiceFailed(
            f"dcs.host, dcs.port: cannot listen on {ctx.config.dcs.host}:{wanted} ({error.strerror}); "
            "set dcs.port to 0 for a free port, or stop what holds it"
        ) from error
