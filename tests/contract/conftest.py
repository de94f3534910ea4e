"""One server of each kind for the whole session, and a clean one for each test: version 1 of model A live, nothing running.

The light engine's cases run in `make test`, those of real SGLang in `make test-sglang`: a missing SGLang is a failure there,
and never a skip.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import Qwen3ForCausalLM

from services.rollout.engines.client import EngineClient, EngineError, PauseMode
from services.rollout.engines.process import EngineProcess
from services.rollout.engines.sglang.command import ENVIRONMENT
from tests.rollout import tiny
from tests.shared.runs import until

torch.set_num_threads(1)
KINDS = ["light", pytest.param("sglang", marks=pytest.mark.sglang)]
START_S = 300.0
SGLANG_CONTEXT = 4096
"""With a longer one it takes memory for what nobody asks of it; it is slow enough that these tokens last."""
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Model:
    folder: Path
    reference: Qwen3ForCausalLM


@pytest.fixture(scope="session")
def a(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("a")
    return Model(folder, tiny.build(folder, seed=1))


@pytest.fixture(scope="session")
def b(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The same shapes, other weights."""
    folder = tmp_path_factory.mktemp("b")
    return Model(folder, tiny.build(folder, seed=2))


@dataclass
class Served:
    """An engine, with the calls that tests make."""

    kind: str
    process: EngineProcess
    client: EngineClient
    started: list[asyncio.Task[Any]] = field(default_factory=list)

    async def sample(
        self, prompts: Any, rid: str | list[str] | None = None, start: int = -1, **sampling: Any
    ) -> list[dict[str, Any]]:
        body: dict[str, Any] = {"input_ids": prompts, "return_logprob": True, "logprob_start_len": start}
        body["sampling_params"] = {"temperature": 1.0, "ignore_eos": True} | sampling
        return await self.client.generate(body | ({"rid": rid} if rid else {}), timeout_s=300)

    async def greedy(self, prompt: list[int], count: int = 8) -> list[int]:
        (answer,) = await self.sample(prompt, temperature=0, max_new_tokens=count)
        return answer["output_ids"]

    @property
    def forever(self) -> int:
        """Tokens of a sample that is still running whenever a test's next call arrives; the test aborts it."""
        return tiny.FOREVER if self.kind == "light" else SGLANG_CONTEXT - 100

    async def running(self, prompts: list[list[int]], **more: Any) -> asyncio.Task[list[dict[str, Any]]]:
        """Samples in the middle of decoding, beside those that are."""
        before = (await self.client.load())["num_running_reqs"]
        task = asyncio.create_task(self.sample(prompts, max_new_tokens=self.forever, **more))
        self.started.append(task)
        await self.some_more(before + len(prompts))
        return task

    async def some_more(self, at_least: int = 1) -> None:
        """Until so many requests run, and each has gone on."""

        async def busy() -> bool:
            return (await self.client.load())["num_running_reqs"] >= at_least

        await until(busy, "the requests run", 60)
        if self.kind == "sglang":  # which does not count tokens
            await asyncio.sleep(0.5)
            return
        wanted = await self.generated() + 10 * at_least

        async def gone_on() -> bool:
            return await self.generated() >= wanted

        await until(gone_on, "they go on", 60)

    async def generated(self) -> int:
        """By the light engine, since it was started."""
        return (await self.client.load())["generated_tokens_total"]

    async def cut_off(self, task: asyncio.Task[list[dict[str, Any]]], at_least: int) -> list[dict[str, Any]]:
        """What running samples have a little later."""
        await self.some_more(at_least)
        assert not task.done()
        await self.client.abort(everything=True)
        answers = await task
        assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
        return answers

    async def idle(self) -> bool:
        load = await self.client.load()
        return load["num_running_reqs"] + load["num_waiting_reqs"] == 0

    async def version(self) -> str:
        return (await self.client.model_info())["weight_version"]

    async def paused(self, mode: PauseMode) -> None:
        await self.client.pause(mode)

    async def reset(self, folder: Path) -> None:
        """As a test found it."""
        await self.client.resume()
        await self.client.abort(everything=True)
        await asyncio.gather(*self.started, return_exceptions=True)
        self.started = []
        with suppress(EngineError):  # none is open
            await self.client.end_update(commit=False)
        await until(self.idle, "nothing runs", 60)
        await self.client.update_from_disk(str(folder), "1")


async def serve(kind: str, folder: Path, **options: Any) -> AsyncIterator[Served]:
    if kind == "sglang":
        assert ENVIRONMENT.exists(), f"{ENVIRONMENT} is missing: make install-sglang"
        options = {"context_length": SGLANG_CONTEXT} | options
    given = {"device": "cpu", "dtype": "float32", "weight_version": "1"} | options
    process = await EngineProcess.start(kind, folder, given, ready_timeout_s=START_S)
    try:
        async with EngineClient(process.url, timeout_s=60, vocab=tiny.VOCAB) as client:
            yield Served(kind, process, client)
    finally:
        await process.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=KINDS)
async def server(request: pytest.FixtureRequest, a: Model) -> AsyncIterator[Served]:
    async for served in serve(request.param, a.folder):
        yield served


@pytest_asyncio.fixture(loop_scope="session")
async def engine(server: Served, a: Model) -> AsyncIterator[Served]:
    yield server
    await server.reset(a.folder)
