"""Two tiny models, and a light engine that serves one over HTTP inside the test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from transformers import Qwen3ForCausalLM

from services.rollout.engines.client import EngineClient
from services.rollout.engines.light.engine import Engine
from services.rollout.engines.light.options import EngineOptions
from services.rollout.engines.light.server import Server
from tests.rollout import tiny

torch.set_num_threads(1)


@dataclass(frozen=True)
class Model:
    folder: Path
    reference: Qwen3ForCausalLM


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    return Model(folder, tiny.build(folder, seed=1))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The same shapes, other weights."""
    folder = tmp_path_factory.mktemp("other")
    return Model(folder, tiny.build(folder, seed=2))


@dataclass
class Light:
    """A served engine, seen from both sides."""

    engine: Engine
    client: EngineClient
    url: str

    async def sample(
        self, prompts: Any, rid: str | None = None, start: int = -1, **sampling: Any
    ) -> list[dict[str, Any]]:
        body: dict[str, Any] = {"input_ids": prompts, "return_logprob": True, "logprob_start_len": start}
        body["sampling_params"] = {"temperature": 1.0, "ignore_eos": True} | sampling
        return await self.client.generate(body | ({"rid": rid} if rid else {}), timeout_s=300)

    def generated(self) -> int:
        return self.engine.scheduler.generated


@asynccontextmanager
async def serve_light(folder: Path, *arguments: str) -> AsyncIterator[Light]:
    engine = Engine.build(EngineOptions.parse(["--model", str(folder), "--device", "cpu", *arguments]), lambda: None)
    server = Server(engine)
    runner = web.AppRunner(server.application(), access_log=None, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.scheduler.start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    try:
        async with EngineClient(url) as client:
            yield Light(engine, client, url)
    finally:
        engine.scheduler.stop(5)
        await server.weights.close()
        await runner.cleanup()


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[Light]]]:
    """`await serve(folder, "--option", "value")`."""
    async with AsyncExitStack() as stack:

        async def start(folder: Path, *arguments: str) -> Light:
            return await stack.enter_async_context(serve_light(folder, *arguments))

        yield start


@pytest.fixture
async def light(model: Model) -> AsyncIterator[Light]:
    async with serve_light(model.folder) as served:
        yield served
