"""The real thing: light engines as processes, sampling while new weights of a real model reach them; one is killed in between."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

from services.rollout.engines.client import EngineClient, EngineDead
from services.rollout.engines.process import EngineProcess
from services.rollout.weights import WeightReceiver
from services.trainer.weights import Publication, WeightPublisher
from tests.dcs.conftest import Replica, World, _beat
from tests.dcs.test_handles import HANDLE
from tests.rollout import tiny
from tests.shared.runs import until

PROMPT = [5, 6, 7, 8, 9]


async def replica(world: World, name: str) -> tuple[Replica, EngineProcess]:
    """As services/rollout/main.py does it."""
    ctx = await world.context("rollout", name)
    receiver = WeightReceiver(ctx, world.folder / "cache" / name)
    await ctx.beat("starting")
    start = await receiver.bootstrap()
    assert start is not None
    process = await EngineProcess.start_for(ctx.config, start.folder)
    world.stack.push_async_callback(process.stop)
    engine = await world.stack.enter_async_context(EngineClient(process.url))
    await receiver.attach(engine, start)
    made = Replica(ctx, receiver, engine, start)
    made.tasks = [asyncio.create_task(receiver.run()), asyncio.create_task(_beat(ctx))]
    world.stack.push_async_callback(made.stop)
    return made, process


async def sample(engine: EngineClient, count: int) -> dict[str, Any]:
    parameters = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": parameters, "return_logprob": True}
    return (await engine.generate(body, timeout_s=600))[0]


async def tokens_of(engine: EngineClient, count: int = 12) -> list[int]:
    return (await sample(engine, count))["output_ids"]


async def drawn_until(version: int, engine: EngineClient, count: int) -> set[tuple[int, ...]]:
    """The versions that drew each sample, one sample after the other, until one is of this version alone."""
    seen: set[tuple[int, ...]] = set()
    while (version,) not in seen:
        spans = (await sample(engine, count))["meta_info"]["weight_versions"]
        seen.add(tuple(int(span["version"]) for span in spans))
        count = 3000
    return seen


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Qwen3ForCausalLM]]:
    folders = [tmp_path_factory.mktemp(f"model{seed}") for seed in range(3)]
    return [(folder, tiny.build(folder, seed=seed)) for seed, folder in enumerate(folders)]


async def publish_of(publisher: WeightPublisher, models: list[tuple[Path, Qwen3ForCausalLM]], step: int) -> int:
    """The weights of the model that is made for this step."""
    tensors = load_file(models[step][0] / "model.safetensors")
    return await publisher.publish(step, tensors.items(), "update")


async def test_weights_reach_sampling_engines(make_world: Any, models: list[tuple[Path, Qwen3ForCausalLM]]) -> None:
    world: World = await make_world(dcs={"timeout_s": 300.0}, rollout={"device": "cpu"})
    shutil.copytree(models[0][0], world.model_dir, dirs_exist_ok=True)
    await world.start_dcs()
    publisher = await world.publisher()

    publish = partial(publish_of, publisher, models)
    await publish(0)
    (a, _), (b, victim) = await asyncio.gather(replica(world, "rollout-a"), replica(world, "rollout-b"))
    assert await tokens_of(a.engine) == tiny.greedy(models[0][1], PROMPT, 12)

    # Two, so that while one begins the other is at it.
    running = asyncio.gather(drawn_until(2, a.engine, 1500), drawn_until(2, a.engine, 3000))
    second = await publish(1)
    await publisher.settled()
    await asyncio.gather(a.holds(second), b.holds(second))
    seen = set().union(*await running)
    assert seen - {(1,)} == {(1, 2), (2,)}, "some were begun under one version and ended under the next"
    for held in (a, b):
        assert await tokens_of(held.engine) == tiny.greedy(models[1][1], PROMPT, 12)
    assert {r.how for r in await world.received(second)} == {"broadcast"}

    os.kill(victim.pid, signal.SIGKILL)
    third = await publish(2)
    with pytest.raises(EngineDead):
        await b.tasks[0]
    await publisher.settled()
    await a.holds(third)
    assert await tokens_of(a.engine) == tiny.greedy(models[2][1], PROMPT, 12)
    assert [member["replica"] for member in await world.dcs.members()] == ["rollout-a"]


async def test_an_engine_that_cannot_map_a_gpus_memory_takes_the_snapshot(
    make_world: Any, models: list[tuple[Path, Qwen3ForCausalLM]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `dcs.cuda_ipc` would offer, to an engine that has no such GPU."""
    world: World = await make_world(placement="colocate", rollout={"device": "cpu"})
    shutil.copytree(models[0][0], world.model_dir, dirs_exist_ok=True)
    await world.start_dcs()
    publisher = await world.publisher()

    publish = partial(publish_of, publisher, models)
    await publish(0)
    held, _ = await replica(world, "rollout-a")
    offer = WeightPublisher._offer

    def on_a_gpu(publisher: WeightPublisher, publication: Publication) -> dict[str, Any]:
        found = offer(publisher, publication)
        return found | {"segments": [HANDLE.fields() for _ in found["segments"]]}

    monkeypatch.setattr(WeightPublisher, "_offer", on_a_gpu)
    version = await publish(1)
    await held.holds(version)
    assert await tokens_of(held.engine) == tiny.greedy(models[1][1], PROMPT, 12)
    first, second = await world.received(version)
    assert (first.how, first.ok, second.how, second.ok) == ("shared", False, "snapshot", True)
    assert "is not visible to this process" in first.error

    async def told() -> bool:
        refusals = [event.message for event in await world.events() if event.kind == "weights_refused"]
        return any(f"GPU {HANDLE.device}" in message for message in refusals)

    await until(told, "the refusal is an event")
