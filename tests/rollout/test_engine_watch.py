"""An engine that hangs is found; one that only waits is not, nor one whose watcher stood still."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
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
    clock = SimpleNamespace(clock=lambda: nullcontext(lambda: float(running.asked)))
    monkeypatch.setattr(watch, "awake", clock)
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


SILENT_S = 8.0
WATCHER = f"""
import asyncio, sys
from services.rollout.engines import watch
watch.PROBE_S, watch.ANSWER_S = 0.01, 1.0
asyncio.run(watch.until_hung(sys.argv[1], silent_s={SILENT_S}, stuck_s=600))
"""


async def test_a_watcher_that_stood_still_does_not_blame_the_engine():
    """It is stopped in the middle of a question, and goes on when all of its deadlines have passed."""
    server = Server()
    url = await server.start()
    watcher = await asyncio.create_subprocess_exec(sys.executable, "-c", WATCHER, url)
    try:
        await until(lambda: server.asked > 2 or watcher.returncode is not None, "it watches")
        server.ready, asked = None, server.asked
        await until(lambda: server.asked > asked or watcher.returncode is not None, "it asks")
        watcher.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        await until(lambda: time.monotonic() - stopped > SILENT_S, "it stands still for too long")
        server.ready, asked = 200, server.asked
        watcher.send_signal(signal.SIGCONT)
        await until(lambda: server.asked > asked + 10 or watcher.returncode is not None, "it asks again")
        assert watcher.returncode is None
    finally:
        if watcher.returncode is None:
            watcher.kill()
        await watcher.wait()
        assert server.runner is not None
        await server.runner.cleanup()
