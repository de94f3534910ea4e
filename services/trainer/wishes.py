"""A person's wish to go back to an earlier version (services/dcs/rollback.py), on the trainer's side.

The running trainer looks for one now and then; if it can be fulfilled, its process ends, and the next one sets the checkpoints
aside that are newer than the one of that step, as if they were damaged. All else follows from going on from a checkpoint: the
undone groups are pending again or dropped, the weights are published as a new version, what is on its way ages from there. It is
refused, with an event, where there is no checkpoint of that step, or the run is deterministic. tests/trainer/test_wishes.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from services.dcs import rollback
from services.dcs.rollback import Wish
from services.trainer.checkpoint import CheckpointError, CheckpointStore
from shared.errors import TransportError
from shared.service import Context, ServiceFailed

log = logging.getLogger(__name__)

POLL_S = 2.0


async def fulfil(ctx: Context, store: CheckpointStore) -> Wish | None:
    """Before anything is loaded: set aside what a stated wish undoes. None: there is none, or it was refused."""
    wish = await rollback.asked(ctx.kv)
    if wish is None:
        return None
    try:
        _refuse_deterministic(ctx)
        undone = await ctx.compute(store.go_back, wish.step)
    except CheckpointError as error:
        await _refuse(ctx, wish, error)
        return None
    await ctx.events.publish("rolling_back", wish.reason, step=wish.step, undone=[entry.step for entry in undone])
    return wish


async def unless_wished(ctx: Context, store: CheckpointStore, training: Coroutine[Any, Any, None]) -> None:
    """Train until the end, or until somebody wants to go back: then this process ends, and the next one goes back."""
    running, wishing = asyncio.create_task(training), asyncio.create_task(_until_wished(ctx, store))
    try:
        await asyncio.wait({running, wishing}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        wish = wishing.result()
        raise ServiceFailed(f"{wish.reason}: starting again from the checkpoint of step {wish.step}")
    finally:
        for task in (running, wishing):
            task.cancel()
        await asyncio.gather(running, wishing, return_exceptions=True)


async def _until_wished(ctx: Context, store: CheckpointStore) -> Wish:
    """Returns when somebody wants to go back and that is possible. Refuses what is not."""
    while True:
        await asyncio.sleep(POLL_S)
        try:
            if (wish := await rollback.asked(ctx.kv)) is None:
                continue
            try:
                _refuse_deterministic(ctx)
                await asyncio.to_thread(store.find, wish.step)
                return wish
            except CheckpointError as error:
                await _refuse(ctx, wish, error)
        except TransportError as error:
            log.debug("the broker does not answer whether somebody wants to go back: %s", error)


def _refuse_deterministic(ctx: Context) -> None:
    if ctx.config.deterministic:
        raise CheckpointError("a deterministic run reaches the same weights again, so going back changes nothing")


async def _refuse(ctx: Context, wish: Wish, error: CheckpointError) -> None:
    await rollback.done(ctx.kv)
    await ctx.events.publish(rollback.REFUSED, f"{wish.reason} (step {wish.step}): {error}", version=wish.version)
