"""The HTTP contract: state, abort, pause, and clients that go away."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from services.rollout.engines.client import EngineError
from services.rollout.engines.light import server as server_module
from tests.rollout import tiny
from tests.rollout.tiny import FOREVER, PROMPTS, until


async def start_long(light: Any, rid: str) -> asyncio.Task[Any]:
    """A sample in the middle of decoding."""
    task = asyncio.create_task(light.sample(PROMPTS[0], rid=rid, max_new_tokens=FOREVER))
    running = light.engine.scheduler.batch
    await until(lambda: any(one.rid == rid and len(one.output) > 3 for one in list(running.sequences)))
    return task


def reason(answers: list[dict[str, Any]]) -> str:
    return answers[0]["meta_info"]["finish_reason"]["type"]


async def test_state_endpoints(light, model) -> None:
    assert await light.client.ready()
    assert await light.client.healthy()
    info = await light.client.model_info()
    assert info["model_path"] == str(model.folder)
    assert info["weight_version"] == "default"
    assert info["architectures"] == ["Qwen3ForCausalLM"]
    info = await light.client.server_info()
    assert (info["engine"], info["staged_updates"], info["context_length"]) == ("light", True, tiny.CONTEXT)
    async with aiohttp.ClientSession(light.url) as session:
        for path in (
            "/health_generate",
            "/get_model_info",
            "/get_server_info",
            "/get_load",
            "/v1/loads",
            "/weights_checker",
        ):
            async with session.get(path) as response:
                assert response.status == 200, path


async def test_a_refusal_has_sglangs_form(light) -> None:
    async with aiohttp.ClientSession(light.url) as session:
        async with session.post("/generate", json={"input_ids": [tiny.VOCAB]}) as response:
            assert response.status == 400
            body = await response.json()
            assert body["success"] is False
            assert body["error"]["message"] == body["message"]
        for path in ("/generate", "/pause_generation", "/end_weight_update"):
            async with session.post(path, data=b"{") as response:
                assert response.status == 400, path
        async with session.post("/pause_generation", json={"mode": "sleep"}) as response:
            assert "none of abort, retract, in_place" in (await response.json())["message"]
        async with session.post("/end_weight_update", json={"comit": False}) as response:
            assert "unknown field comit" in (await response.json())["message"]


async def test_abort_by_prefix_returns_the_partial_output(light) -> None:
    mine = await start_long(light, "group-1/a")
    others = await start_long(light, "group-2/a")
    await light.client.abort("group-1")
    (answer,) = await mine
    assert reason([answer]) == "abort"
    assert 0 < len(answer["output_ids"]) < FOREVER
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
    assert not others.done()
    await light.client.abort("nobody")
    with pytest.raises(EngineError, match="name a request"):
        await light.client.abort()
    await light.client.abort(everything=True)
    assert reason(await others) == "abort"


async def test_pause_abort_ends_what_runs_and_holds_what_comes(light) -> None:
    task = await start_long(light, "a")
    await light.client.pause("abort")
    assert reason(await task) == "abort"
    assert not await light.client.ready()
    assert await light.client.healthy()
    held = asyncio.create_task(light.sample(PROMPTS[0], max_new_tokens=3))
    await until(lambda: len(light.engine.scheduler.waiting) == 1)
    await light.client.resume()
    assert reason(await held) == "length"
    assert await light.client.ready()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_freezes_and_a_request_can_be_aborted_meanwhile(light, mode: str) -> None:
    first, second = await start_long(light, "a"), await start_long(light, "b")
    await light.client.pause(mode)
    frozen = light.generated()
    load = await light.client.load()
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == ((0, 2) if mode == "retract" else (2, 0))
    await light.client.abort("b")
    assert reason(await second) == "abort"
    assert light.generated() == frozen
    await light.client.resume()
    await until(lambda: light.generated() > frozen + 10)
    await light.client.abort("a")
    (answer,) = await first
    assert reason([answer]) == "abort"
    assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)


async def test_a_client_that_goes_away_aborts_its_request(light) -> None:
    task = await start_long(light, "a")
    task.cancel()
    await until(lambda: not light.engine.scheduler.batch)
    assert light.generated() < FOREVER


async def test_a_stuck_model_is_unhealthy_and_a_dead_one_says_so(light, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "HEALTH_TIMEOUT_S", 0.05)
    loop = asyncio.get_running_loop()
    release = asyncio.Event()
    stuck = light.engine.scheduler.call(lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20))
    assert not await light.client.healthy()
    release.set()
    await asyncio.wrap_future(stuck)
    task = await start_long(light, "a")
    monkeypatch.setattr(light.engine.model, "hidden", lambda *_: 1 / 0)
    with pytest.raises(EngineError, match="the model's thread has ended") as caught:
        await task
    assert caught.value.status == 503
    with pytest.raises(EngineError, match="the engine has stopped"):
        await light.sample(PROMPTS[0], max_new_tokens=1)
    assert not await light.client.ready()
