"""The client: a deadline on every call, errors by their kind, and tolerance of older SGLang releases."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from services.dcs.digest import TensorSpec
from services.rollout.engines.client import EngineClient, EngineDead, EngineError, EngineTimeout

Serve = Callable[[dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]], Awaitable[str]]


@pytest.fixture
async def stub() -> AsyncIterator[Serve]:
    """`await stub({path: handler})` -> URL of a server that has these paths only."""
    runners: list[web.AppRunner] = []

    async def start(handlers: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]) -> str:
        app = web.Application()
        app.add_routes([web.route("*", path, handler) for path, handler in handlers.items()])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return "http://{}:{}".format(*runner.addresses[0][:2])

    yield start
    for runner in runners:
        await runner.cleanup()


CALLS: dict[str, Callable[[EngineClient], Awaitable[object]]] = {
    "/generate": lambda e: e.generate({}, timeout_s=0.1),
    "/abort_request": lambda e: e.abort("a"),
    "/pause_generation": lambda e: e.pause(),
    "/continue_generation": lambda e: e.resume(),
    "/flush_cache": lambda e: e.flush_cache(),
    "/model_info": lambda e: e.model_info(),
    "/server_info": lambda e: e.server_info(),
    "/v1/loads": lambda e: e.load(),
    "/begin_weight_update": lambda e: e.begin_update(),
    "/destroy_weights_update_group": lambda e: e.destroy_group("g", timeout_s=0.1),
    "/update_weights_from_disk": lambda e: e.update_from_disk("x", timeout_s=0.1),
    "/update_weights_from_tensor": lambda e: e.update_from_tensor(["x"], timeout_s=0.1),
    "/weights_checker": lambda e: e.checksums(timeout_s=0.1),
    "/update_weight_version": lambda e: e.set_version("1"),
}


@pytest.mark.parametrize("path", CALLS)
async def test_every_call_has_a_deadline(stub: Serve, path: str) -> None:
    async def silent(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        raise AssertionError("unreachable")

    async with EngineClient(await stub({path: silent}), timeout_s=0.1) as engine:
        with pytest.raises(EngineTimeout, match="no answer within 0.1 s"):
            await CALLS[path](engine)


async def test_long_calls_have_deadlines_of_their_own(stub: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        raise AssertionError("unreachable")

    monkeypatch.setattr("services.rollout.engines.client.MARGIN_S", 0.1)
    monkeypatch.setattr("services.rollout.engines.client.WEIGHTS_TIMEOUT_S", 0.1)
    paths = ("/init_weights_update_group", "/update_weights_from_distributed", "/end_weight_update")
    async with EngineClient(await stub(dict.fromkeys(paths, silent))) as engine:
        with pytest.raises(EngineTimeout):
            await engine.init_group("h", 1, 1, 2, "g", "gloo", timeout_s=0.1)
        with pytest.raises(EngineTimeout):
            await engine.update_from_distributed([TensorSpec("a", "float32", (1,), "0" * 64)], "g", timeout_s=0.1)
        with pytest.raises(EngineTimeout):
            await engine.end_update()


async def test_probes_answer_false_within_their_deadline(stub: Serve) -> None:
    async def silent(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        raise AssertionError("unreachable")

    async with EngineClient(await stub({"/ready": silent, "/health": silent}), timeout_s=0.1) as engine:
        assert not await engine.ready()
        assert not await engine.healthy()


async def test_nobody_listening_or_a_cut_connection_is_a_dead_engine(stub: Serve) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with EngineClient(f"http://127.0.0.1:{unused.getsockname()[1]}") as engine:
            with pytest.raises(EngineDead):
                await engine.model_info()
            assert not await engine.ready()

    async def cut(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with EngineClient(await stub({"/generate": cut})) as engine:
        with pytest.raises(EngineDead):
            await engine.generate({})


@pytest.mark.parametrize(
    ("status", "body", "kind", "said"),
    [
        (400, '{"success": false, "message": "no room"}', EngineError, "no room"),
        (400, '{"error": {"message": "too long"}}', EngineError, "too long"),
        (500, "Internal Server Error", EngineError, "Internal Server Error"),
        (200, '{"success": false, "message": "half done"}', EngineError, "half done"),
        (503, '{"message": "the model died"}', EngineDead, "the model died"),
    ],
)
async def test_refusals_carry_the_engines_words(
    stub: Serve, status: int, body: str, kind: type[EngineError], said: str
) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body)

    async with EngineClient(await stub({"/generate": refuse})) as engine:
        with pytest.raises(kind, match=said) as caught:
            await engine.generate({})
        assert type(caught.value) is kind
        assert caught.value.status == status


async def test_older_sglang_releases_are_served(stub: Serve) -> None:
    async def info(_: web.Request) -> web.StreamResponse:
        return web.json_response({"version": "0.4.10"})

    async def load(_: web.Request) -> web.StreamResponse:
        return web.json_response([{"num_reqs": 3}])

    async def fine(_: web.Request) -> web.StreamResponse:
        return web.Response()

    paths = {"/get_server_info": info, "/get_model_info": info, "/get_load": load, "/health": fine}
    async with EngineClient(await stub(paths)) as engine:
        assert await engine.begin_update() is False
        assert await engine.end_update() is False
        assert (await engine.server_info())["version"] == "0.4.10"
        assert (await engine.model_info())["version"] == "0.4.10"
        assert (await engine.load())["num_reqs"] == 3
        assert await engine.ready()
        with pytest.raises(EngineError, match="404"):
            await engine.pause("retract")


async def test_only_what_was_asked_for_is_sent(stub: Serve) -> None:
    """SGLang's own server must not meet the light engine's extensions unless they are used."""
    bodies: list[object] = []

    async def keep(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.json_response({"success": True, "message": ""})

    async with EngineClient(await stub({"/end_weight_update": keep})) as engine:
        await engine.end_update()
        await engine.end_update(commit=False)
        await engine.end_update(weight_version="3", mode="in_place")
    assert bodies == [{}, {"commit": False}, {"weight_version": "3", "mode": "in_place"}]
