"""Engines that run elsewhere: reached or not, of the run's model or another, and given the run's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from services.dcs.digest import TensorSpec, digest, dtype_name, tensor_checksum
from services.dcs.snapshots import Manifest
from services.rollout import elsewhere
from services.rollout.weights import Start
from shared import wanted
from shared.broker import EmbeddedBroker
from shared.config import ConfigError
from shared.jetstream import Connection
from shared.service import Context
from tests.controller.pipeline import open_context, run_config
from tests.rollout import tiny
from tests.rollout.conftest import Light, Model

Serve = Callable[..., Awaitable[Light]]


@pytest.fixture
async def ctx(
    broker: EmbeddedBroker, connect: Callable[..., Awaitable[Connection]], run_name: str, tmp_path: Path
) -> Context:
    return await open_context(await connect(broker.url), run_config(run_name, str(tmp_path)), "rollout", "rollout-2")


def start_of(folder: Path) -> Start:
    tensors = load_file(folder / "model.safetensors")
    specs = [
        TensorSpec(name, dtype_name(one), tuple(one.shape), tensor_checksum(one))
        for name, one in sorted(tensors.items())
    ]
    return Start(folder, Manifest(7, 3, digest(specs), [], specs, [list(range(len(specs)))]))


async def test_the_record_says_where_the_engine_is(ctx: Context):
    assert await elsewhere.engine_url(ctx) == ""
    spec = {"service": "rollout", "by": "op", "engine_url": "http://10.0.0.7:30000"}
    await wanted.change(ctx.kv, lambda _: wanted.Wanted({"rollout-2": spec}))
    assert await elsewhere.engine_url(ctx) == "http://10.0.0.7:30000"


async def test_one_that_cannot_be_reached_is_told_of_and_one_that_went_away_is_waited_for(
    ctx: Context, monkeypatch: pytest.MonkeyPatch, light: Light
):
    assert await elsewhere.reach(ctx, light.url, again=False)
    monkeypatch.setattr(elsewhere, "REACH_S", 1.0)
    nobody = "http://127.0.0.1:9"
    with pytest.raises(ConfigError, match=r"the engine at http://127\.0\.0\.1:9 cannot be reached"):
        await elsewhere.reach(ctx, nobody, again=False)
    waiting = asyncio.create_task(elsewhere.reach(ctx, nobody, again=True))
    await asyncio.wait({waiting}, timeout=1.6)
    assert not waiting.done()
    ctx.stopping.set()
    assert not await asyncio.wait_for(waiting, 60)


async def test_it_is_given_the_weights_of_the_run(ctx: Context, serve: Serve, model: Model, other: Model):
    light = await serve(model.folder)
    start = start_of(other.folder)
    await elsewhere.give_weights(ctx, light.client, start)
    held = (await light.client.checksums()).tensors
    assert held == {spec.name: spec.sha256 for spec in start.manifest.tensors}
    assert (await light.client.model_info())["weight_version"] == "7"


async def test_one_that_serves_another_model_is_refused(ctx: Context, serve: Serve, model: Model, tmp_path: Path):
    light = await serve(model.folder)
    before: Any = (await light.client.checksums()).tensors
    deeper, wider = tmp_path / "deeper", tmp_path / "wider"
    tiny.build(deeper, num_hidden_layers=3)
    tiny.build(wider, intermediate_size=192)
    with pytest.raises(ConfigError, match="serves another model: 11 tensors are only there or only here"):
        await elsewhere.give_weights(ctx, light.client, start_of(deeper))
    with pytest.raises(ConfigError, match="did not take version 7"):
        await elsewhere.give_weights(ctx, light.client, start_of(wider))
    assert (await light.client.checksums()).tensors == before
