"""What holds at every broker that dies while work goes on. `die` kills it and returns when it is back.

The work has no end of its own: it goes on until the last death is over, however fast the machine is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from shared.kv import KV
from shared.transfer_queue import TransferQueue
from tests.shared.runs import until

Die = Callable[[], Awaitable[None]]


async def stores_each_message_once(queue: TransferQueue, die: Die, deaths: int, deadline_s: float = 60.0) -> None:
    """Also in the order of publishing."""
    total, enough = 0, False

    def messages() -> Iterator[tuple[str, bytes, str]]:
        nonlocal total
        while not enough:
            yield queue.subjects.trajectory("x"), b"%d" % total + b"." * 4000, f"{total}"
            total += 1

    work = asyncio.create_task(queue.publish_all(messages()))
    for _ in range(deaths):
        before = total
        await until(lambda before=before: total > before + 300 or work.done(), "some are published", deadline_s)
        await die()
    enough = True
    assert len(await asyncio.wait_for(work, deadline_s)) == total
    found = [int(data.rstrip(b".")) async for data, _ in queue.read("trajectories")]
    assert found == list(range(total)), "each exactly once, and in order also over the restarts"


async def makes_each_update_once(kv: KV, die: Die, deaths: int, deadline_s: float = 60.0) -> int:
    """Of the key `n`, just created as the bucket's first value. Returns its revision."""
    revision, total, enough = 1, 0, False

    async def count() -> None:
        nonlocal revision, total
        while not enough:
            total += 1
            revision = await kv.update("n", b"%d" % total, revision)

    counting = asyncio.create_task(count())
    for _ in range(deaths):
        before = revision
        await until(lambda before=before: revision > before + 20 or counting.done(), "some updates", deadline_s)
        await die()
    enough = True
    await asyncio.wait_for(counting, deadline_s)
    assert await kv.get("n") == (b"%d" % total, revision)
    assert revision == total + 1, "no value was written twice"
    return revision
