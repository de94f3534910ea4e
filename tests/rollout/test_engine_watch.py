"""An engine that hangs is found, one that only waits is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest
from aiohttp import web

from services.rollout.engines import watch
from services.rollout.engines.client import EngineDead
from services.rollout.engines.watch import until_hung
from tests.shared.runs import until


class Server:
    """Answers /ready and /health as the test says: a status, or None for silence."""

    def __init__(self) -> None:
        self.ready: int | None = 200
        self.health: int | None = 200
        self.asked = 0
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

    def _handler(self, status: Callable[[], int | None]):
        async def handle(_: web.Request) -> web.Response:
            self.asked += 1
            while (code := status()) is None:  # noqa: ASYNC110 - nobody tells it
                await asyncio.sleep(0.02)
            return web.Response(status=code)

        return handle


@pytest.fixture
async def server(monkeypatch) -> AsyncIterator[Server]:
    """Time goes on by a second with each question."""
    running = Server()
    monkeypatch.setattr(watch, "PROBE_S", 0.01)
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: float(running.asked)))
    yield running
    assert running.runner is not None
    await running.runner.cleanup()


async def hangs(url: str) -> str:
    with pytest.raises(EngineDead) as caught:
        await asyncio.wait_for(until_hung(url, silent_s=4, stuck_s=12), 60)
    return str(caught.value)


async def test_silence(server, monkeypatch):
    monkeypatch.setattr(watch, "ANSWER_S", 0.1)
    url = await server.start()
    server.ready = server.health = None
    assert "hangs: no answer" in await hangs(url)


async def test_no_steps(server):
    url = await server.start()
    server.health = 503
    assert "hangs: no step" in await hangs(url)


async def test_answers_that_take_too_long_for_a_step(server, monkeypatch):
    monkeypatch.setattr(watch, "STEP_S", 0.1)
    url = await server.start()
    server.health = None
    assert "hangs: no step" in await hangs(url)


@pytest.mark.parametrize(("ready", "health"), [(200, 200), (503, 200), (404, 200)], ids=["well", "paused", "older"])
async def test_an_engine_that_works_is_left_alone(server, ready, health):
    url = await server.start()
    server.ready, server.health = ready, health
    watching = asyncio.create_task(until_hung(url, silent_s=4, stuck_s=12))
    await until(lambda: server.asked > 40 or watching.done(), "it is asked again and again", 60)
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_gone(server):
    url = await server.start()
    await server.runner.cleanup()
    assert "the engine is gone" in await hangs(url)
