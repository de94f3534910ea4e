"""Training waits for the copies only; what is saved is covered when it is durable, in order, and a failure is not lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.trainer.checkpoint import CheckpointStore
from services.trainer.saving import Saver, save
from services.trainer.state_files import Written, file_of, write
from tests.shared.runs import until


class Ranks:
    """One rank whose disk does as the test says."""

    def __init__(self) -> None:
        self.free = False
        self.full = False
        self.asked = 0
        self.copied: list[float] = []
        self.folder = Path()

    def save(self, folder: Path, _models: Mapping[str, str]) -> None:
        self.folder = folder
        self.copied.append(len(self.copied))

    def saved(self) -> dict[str, Written] | None:
        self.asked += 1
        if self.full:
            raise OSError("the disk is full")
        if not self.free:
            return None
        return {file_of(0): write(self.folder / file_of(0), [("weights/w", torch.tensor(self.copied[-1]))])}


class Ctx:
    config = SimpleNamespace(hang_timeout_s=60.0)

    async def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    async def vouch(self, awaitable: Awaitable[Any], _limit_s: float | None = None) -> Any:
        return await awaitable


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, keep=4)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


@pytest.fixture
def saver(store: CheckpointStore, ranks: Ranks) -> Saver:
    return Saver(Ctx(), store, ranks, {"policy": ""})  # type: ignore[arg-type]


async def until_asked(ranks: Ranks) -> None:
    await until(lambda: ranks.asked >= 3, "the third look")


async def test_training_goes_on_and_covers_when_durable(saver: Saver, store: CheckpointStore, ranks: Ranks) -> None:
    covered: list[int] = []

    async def cover() -> None:
        covered.append(len(store.entries()))

    await saver.begin(1, {"step": 1}, then=cover)
    await until_asked(ranks)
    assert (ranks.copied, store.entries(), covered) == ([0], [], [])
    assert await saver.unless_failed(asyncio.sleep(0, "a group")) == "a group"
    ranks.free = True
    await saver.settled()
    assert covered == [1]
    found = store.load()
    assert found is not None
    assert found.meta == {"step": 1}


async def test_one_at_a_time(saver: Saver, store: CheckpointStore, ranks: Ranks) -> None:
    await saver.begin(1, {})
    second = asyncio.create_task(saver.begin(2, {}))
    await until_asked(ranks)
    assert ranks.copied == [0], "the second is copied only when the first is durable"
    ranks.free = True
    await second
    await saver.settled()
    assert [entry.step for entry in store.entries()] == [1, 2]


async def test_a_failure_ends_whatever_the_trainer_waits_for(
    saver: Saver, store: CheckpointStore, ranks: Ranks
) -> None:
    covered: list[int] = []

    async def cover() -> None:
        covered.append(1)

    await saver.begin(1, {}, then=cover)
    forever = asyncio.create_task(saver.unless_failed(asyncio.Event().wait()))
    await until_asked(ranks)
    assert not forever.done()
    ranks.full = True
    with pytest.raises(OSError, match="the disk is full"):
        await asyncio.wait_for(forever, 60)
    assert (covered, list(store.folder.iterdir())) == ([], [])
    await saver.close()


async def test_given_up(saver: Saver, store: CheckpointStore, ranks: Ranks) -> None:
    await saver.begin(1, {})
    await until_asked(ranks)
    await saver.close()
    assert list(store.folder.iterdir()) == []


def test_saved_at_once(store: CheckpointStore, ranks: Ranks) -> None:
    ranks.free = True
    assert save(store, ranks, {"policy": ""}, 3, {}).step == 3  # type: ignore[arg-type]
    ranks.full = True
    with pytest.raises(OSError, match="the disk is full"):
        save(store, ranks, {"policy": ""}, 4, {})  # type: ignore[arg-type]
    assert [path.name for path in store.folder.iterdir()] == ["checkpoint-00000001-step-00000003"]
