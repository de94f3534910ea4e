"""A small run to test the transport with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from shared import publisher
from shared.broker import EmbeddedBroker
from shared.config import RunConfig, parse
from shared.jetstream import Connection
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue


def make_config(run: str, **changes: Any) -> RunConfig:
    data: dict[str, Any] = {
        "run": run,
        "steps": 1,
        "groups_per_step": 2,
        "samples_per_group": 2,
        "model": {"path": "model"},
        "prompts": {"source": "prompts.jsonl"},
        "reward": {"functions": [{"path": "task.reward"}]},
        "sampling": {"max_new_tokens": 64, "max_prompt_tokens": 64},
        "broker": {"max_bytes": 256 << 20},
    }
    return parse(data | changes, "test")


async def open_queue(connection: Connection, run: str, **changes: Any) -> TransferQueue:
    """A queue whose streams exist."""
    queue = TransferQueue(connection, Subjects(run))
    await queue.ensure_streams(make_config(run, **changes))
    return queue


async def kill_and_restart(broker: EmbeddedBroker, pause_s: float = 0.2) -> None:
    await asyncio.to_thread(broker.kill)
    await asyncio.sleep(pause_s)
    await asyncio.to_thread(broker.start)


def publisher_clock_runs_ahead(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Deadlines of what is being published pass, whatever the machine has done in the meantime."""
    patch.setattr(publisher, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + seconds))


@asynccontextmanager
async def beside(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[None]:
    """Meanwhile these go on; they are cancelled at the end."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], Any], what: str, deadline_s: float = 60.0) -> None:
    """Wait for a condition, which may be sync or async. The deadline is for what never happens, not for what must be quick."""
    deadline = time.monotonic() + deadline_s
    while True:
        found = condition()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return
        assert time.monotonic() < deadline, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(0.02)
