"""Checkpoints of what the ranks hold, written while training goes on.

Every rank copies its share into host memory, which is all that training waits for, and a thread of its own writes it
(state_files.py). When all files are durable the checkpoint gets its name, and only then what it covers is acknowledged. One is on
its way at a time: the next begins when the one before is durable. What goes wrong meanwhile is raised where the trainer waits.
tests/trainer/test_saving.py; killed in the middle of it: tests/trainer/layouts/test_ranks.py, tests/chaos.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from services.trainer.checkpoint import CheckpointStore, Entry, Unfinished
from services.trainer.ranks import Ranks
from shared.service import Context

T = TypeVar("T")

POLL_S = 0.02
SLOWEST_POLL_S = 1.0
"""Looked for more and more seldom: a large checkpoint takes minutes."""


def save(
    store: CheckpointStore,
    ranks: Ranks,
    states: Mapping[str, str],
    step: int,
    meta: Mapping[str, Any],
    score: float | None = None,
) -> Entry:
    """A checkpoint that is durable when this returns. `states`: the models and their prefixes."""
    unfinished = begin(store, ranks, states, step)
    try:
        while (written := ranks.saved()) is None:
            time.sleep(POLL_S)
    except BaseException:
        store.abandon(unfinished)
        raise
    return store.finish(unfinished, written, meta, score)


def begin(store: CheckpointStore, ranks: Ranks, states: Mapping[str, str], step: int) -> Unfinished:
    """The state is copied when this returns; `ranks.saved` tells when it is written."""
    unfinished = store.begin(step)
    try:
        ranks.save(unfinished.folder, states)
    except BaseException:
        store.abandon(unfinished)
        raise
    return unfinished


class Saver:
    """Saves behind the training loop."""

    def __init__(self, ctx: Context, store: CheckpointStore, ranks: Ranks, states: Mapping[str, str]) -> None:
        self._ctx, self._store, self._ranks, self._states = ctx, store, ranks, states
        self._task: asyncio.Task[None] | None = None

    async def begin(
        self,
        step: int,
        meta: Mapping[str, Any],
        score: float | None = None,
        then: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Returns when everything is copied; `then` follows when the checkpoint is durable. Waits for the one before."""
        await self.settled()
        unfinished = await self._ctx.compute(begin, self._store, self._ranks, self._states, step)
        self._task = asyncio.create_task(self._finish(unfinished, meta, score, then))

    async def settled(self) -> None:
        """Until nothing is on its way. Raises what went wrong."""
        if self._task is not None:
            await self._ctx.vouch(asyncio.shield(self._task), self._ctx.config.hang_timeout_s)
            self._task = None

    async def unless_failed(self, awaitable: Awaitable[T]) -> T:
        """The awaitable's result, or what goes wrong with the checkpoint on its way, whichever comes first."""
        work = asyncio.ensure_future(awaitable)
        try:
            if self._task is not None:
                await asyncio.wait({work, self._task}, return_when=asyncio.FIRST_COMPLETED)
                if self._task.done():
                    await self.settled()
            return await work
        finally:
            work.cancel()

    async def close(self) -> None:
        """Give up what is on its way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _finish(
        self,
        unfinished: Unfinished,
        meta: Mapping[str, Any],
        score: float | None,
        then: Callable[[], Coroutine[Any, Any, None]] | None,
    ) -> None:
        try:
            pause = POLL_S
            while (written := await self._ctx.compute(self._ranks.saved)) is None:
                await asyncio.sleep(pause)
                pause = min(1.5 * pause, SLOWEST_POLL_S)
        except BaseException:
            self._store.abandon(unfinished)
            raise
        await asyncio.to_thread(self._store.finish, unfinished, written, meta, score)
        if then is not None:
            await then()
