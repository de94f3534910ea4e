"""The controller's HTTP interface: what the run is doing, read-only. OpenAPI at /openapi.json.

GET /status   state, step, credits, ledger, rewards, queues, replicas
GET /health   200 while the controller's own loop goes round, 503 if it has not for a while
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from shared.errors import TransportError
from shared.service import Context

log = logging.getLogger(__name__)

LOOK_UP_S = 5.0
SILENT_S = 30.0
"""A loop that has not gone round for so long counts as hanging."""


class Replica(BaseModel):
    service: str
    replica: str
    state: str
    progress: int
    version: int
    step: int
    detail: dict[str, Any]
    host: str
    pid: int
    heard_s_ago: float


class Queue(BaseModel):
    messages: int
    bytes: int
    pending: int
    ack_pending: int


class Status(BaseModel):
    run: str
    state: str
    """running | finished | failed:<why>"""
    step: int
    """Updates done, of `steps`."""
    steps: int
    slots: int
    in_flight: int
    issued: int
    trained: int
    dropped: dict[str, int]
    reward: float | None
    """Mean reward of the last complete update."""
    evaluations: dict[int, float | None]
    """Mean reward by step."""
    queues: dict[str, Queue] | None
    """None: the broker does not answer."""
    replicas: list[Replica] | None


class Health(BaseModel):
    ok: bool
    loop_s_ago: float


def build(ctx: Context, progress: Callable[[], dict[str, Any]], last_round: Callable[[], float]) -> FastAPI:
    """`progress` gives Status without queues and replicas; `last_round` the monotonic time of the loop's last round."""
    app = FastAPI(title=f"slipstream controller of {ctx.run}")

    @app.get("/status")
    async def status() -> Status:
        try:
            async with asyncio.timeout(LOOK_UP_S):
                queues = {name: Queue(**asdict(depth)) for name, depth in (await ctx.queue.depths()).items()}
                return Status(**progress(), queues=queues, replicas=await _replicas(ctx))
        except (TransportError, TimeoutError) as error:
            log.warning("status without queues and replicas: the broker does not answer (%s)", error)
            return Status(**progress(), queues=None, replicas=None)

    @app.get("/health", responses={503: {"model": Health}})
    async def health() -> JSONResponse:
        ago = time.monotonic() - last_round()
        answer = Health(ok=ago < SILENT_S, loop_s_ago=round(ago, 3))
        return JSONResponse(answer.model_dump(), status_code=200 if answer.ok else 503)

    return app


async def _replicas(ctx: Context) -> list[Replica]:
    now = time.time()
    return [
        Replica(
            service=beat.service,
            replica=beat.replica,
            state=beat.state,
            progress=beat.progress,
            version=beat.version,
            step=beat.step,
            detail=beat.detail,
            host=beat.host,
            pid=beat.pid,
            heard_s_ago=round(max(0.0, now - beat.at), 3),
        )
        for beat in await ctx.registry.alive()
    ]
