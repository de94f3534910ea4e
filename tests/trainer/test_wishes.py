"""Going back because somebody wants to: which checkpoints are left, when it is refused, and that no crash loses the wish."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.dcs import rollback
from services.dcs.rollback import Wish
from services.trainer import wishes
from services.trainer.checkpoint import CheckpointError, CheckpointStore
from shared.broker import EmbeddedBroker
from shared.records import Event
from shared.service import Context, ServiceFailed
from shared.wire import decode
from tests.controller.pipeline import open_context, run_config
from tests.shared.runs import until
from tests.trainer.test_checkpoint import save


def store_with(folder: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(folder, keep=9)
    for step in steps:
        save(store, step, {"w": torch.tensor([float(step)])}, {"step": step})
    return store


def steps(store: CheckpointStore) -> list[int]:
    return [entry.step for entry in store.entries()]


def test_newer_checkpoints_are_set_aside(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10, 20, 30)
    assert [entry.step for entry in store.go_back(10)] == [20, 30]
    assert steps(store) == [10]
    assert [entry.step for entry in store.set_aside(store.find(10).sequence)] == [20, 30]
    assert store.go_back(10) == []
    loaded = store.load()
    assert loaded is not None
    assert loaded.meta["step"] == 10


def test_without_a_checkpoint_of_that_step_nothing_is_touched(tmp_path: Path) -> None:
    store = store_with(tmp_path, 10, 20)
    with pytest.raises(CheckpointError, match="no checkpoint of step 15; there are 10, 20"):
        store.go_back(15)
    assert steps(store) == [10, 20]


@pytest.fixture
async def ctx(broker: EmbeddedBroker, run_name: str, connect: Any, tmp_path: Path) -> Context:
    config = run_config(run_name, str(tmp_path))
    return await open_context(await connect(broker.url), config, "trainer", "trainer-0")


async def told(ctx: Context) -> list[tuple[str, str]]:
    events = [decode(data, Event) async for data, _ in ctx.queue.read("events")]
    return [(event.kind, event.message) for event in events]


async def refused(ctx: Context) -> bool:
    return await rollback.asked(ctx.kv) is None


async def test_a_wish_stands_until_it_is_on_record(ctx: Context, tmp_path: Path) -> None:
    store = store_with(tmp_path / "checkpoints", 10, 20)
    assert await wishes.fulfil(ctx, store) is None
    await rollback.ask(ctx.kv, Wish(4, 10))
    for _ in range(2):  # killed in between
        assert await wishes.fulfil(ctx, store) == Wish(4, 10)
        assert steps(store) == [10]
    await rollback.done(ctx.kv)
    assert await wishes.fulfil(ctx, store) is None
    assert ("rolling_back", "rollback to version 4") in await told(ctx)


async def test_a_running_trainer_ends_for_it(ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wishes, "POLL_S", 0.02)
    store = store_with(tmp_path / "checkpoints", 10, 20)
    stopped = asyncio.Event()

    async def training() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            stopped.set()

    await rollback.ask(ctx.kv, Wish(4, 10))
    with pytest.raises(ServiceFailed, match="rollback to version 4: starting again from the checkpoint of step 10"):
        await wishes.unless_wished(ctx, store, training())
    assert stopped.is_set()
    assert steps(store) == [10, 20], "the next process does it, once nobody else may save"


@pytest.mark.parametrize("deterministic", [False, True])
async def test_what_cannot_be_is_refused_and_training_goes_on(
    ctx: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    monkeypatch.setattr(wishes, "POLL_S", 0.02)
    store = store_with(tmp_path / "checkpoints", 10)
    wish = Wish(4, 10 if deterministic else 15)
    seen: Any = SimpleNamespace(
        kv=ctx.kv, events=ctx.events, compute=ctx.compute, config=SimpleNamespace(deterministic=deterministic)
    )
    await rollback.ask(ctx.kv, wish)

    async def training() -> None:
        await until(lambda: refused(ctx), "it is refused", 60)

    await asyncio.wait_for(wishes.unless_wished(seen, store, training()), 120)
    await rollback.ask(ctx.kv, wish)
    assert await wishes.fulfil(seen, store) is None
    assert await rollback.asked(ctx.kv) is None
    why = "reaches the same weights again" if deterministic else "no checkpoint of step 15; there are 10"
    messages = [message for kind, message in await told(ctx) if kind == rollback.REFUSED]
    assert len(messages) == 2
    assert all(why in message for message in messages)
