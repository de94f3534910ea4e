"""What lies ready comes at once: for work that costs the same for one message as for many. tests/dcs/test_batches.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

T = TypeVar("T")


async def in_batches(messages: AsyncIterator[T], most: int) -> AsyncIterator[list[T]]:
    """The messages in their order: each time all that came since the last time, at least one and at most `most`. Waits for
    nothing but the next one; ends, or raises, as `messages` does, after what came before."""
    ready: asyncio.Queue[T] = asyncio.Queue(most)

    async def fill() -> None:
        async for message in messages:
            await ready.put(message)

    filling = asyncio.create_task(fill())
    first = asyncio.create_task(ready.get())
    try:
        while True:
            await asyncio.wait({first, filling}, return_when=asyncio.FIRST_COMPLETED)
            if not first.done() and ready.empty():
                filling.result()
                return
            batch = [await first]
            while not ready.empty() and len(batch) < most:
                batch.append(ready.get_nowait())
            first = asyncio.create_task(ready.get())
            yield batch
    finally:
        filling.cancel()
        first.cancel()
        await asyncio.gather(filling, first, return_exceptions=True)
