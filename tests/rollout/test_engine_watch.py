"""An engine that hangs is found, one that only waits is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web

from services.rollout.engines import watch
from services.rollout.engines.client import EngineDead
from services.rollout.engines.watch import until_hung


class Server:
    """Answers /ready and /health as the test says: a status, or None for silence."""

    def __init__(self) -> None:
        self.ready: int | None = 200
        self.health: int | None = 200
        self.runner: web.AppRunner | None = None

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/ready", self._handler(lambda: self.ready))
        app.router.add_get("/health", self._handler(lambda: self.health))
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    @staticmethod
    def _handler(status: Callable[[], int | None]):
        async def handle(_: web.Request) -> web.Response:
            while (code := status()) is None:  # noqa: ASYNC110 - nobody tells it
                await asyncio.sleep(0.02)
            return web.Response(status=code)

        return handle


@pytest.fixture
async def server(monkeypatch) -> AsyncIterator[Server]:
    for name, seconds in (("PROBE_S", 0.05), ("ANSWER_S", 0.2), ("STEP_S", 0.2)):
        monkeypatch.setattr(watch, name, seconds)
    running = Server()
    yield running
    assert running.runner is not None
    await running.runner.cleanup()


async def hangs(url: str, within_s: float = 10.0) -> str:
    with pytest.raises(EngineDead) as caught:
        await asyncio.wait_for(until_hung(url, silent_s=0.5, stuck_s=1.5), within_s)
    return str(caught.value)


async def test_silence(server):
    url = await server.start()
    server.ready = server.health = None
    assert "hangs: no answer" in await hangs(url)


async def test_no_steps(server):
    url = await server.start()
    server.health = 503
    assert "hangs: no step" in await hangs(url)


async def test_answers_that_take_too_long_for_a_step(server):
    url = await server.start()
    server.health = None
    assert "hangs: no step" in await hangs(url)


@pytest.mark.parametrize(("ready", "health"), [(200, 200), (503, 200), (404, 200)], ids=["well", "paused", "older"])
async def test_an_engine_that_works_is_left_alone(server, ready, health):
    url = await server.start()
    server.ready, server.health = ready, health
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(until_hung(url, silent_s=0.5, stuck_s=1.0), 2.0)


async def test_gone(server):
    url = await server.start()
    await server.runner.cleanup()
    assert "the engine is gone" in await hangs(url)
