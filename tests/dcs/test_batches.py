"""Messages that lie ready come in one batch, in order, and an end or an error comes after them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.dcs.batches import in_batches


async def numbers(count: int, error: Exception | None = None) -> AsyncIterator[int]:
    for number in range(count):
        yield number
    if error is not None:
        raise error


async def test_all_come_once_in_order_and_what_came_meanwhile_comes_together() -> None:
    found, sizes = list[int](), list[int]()
    async for batch in in_batches(numbers(100), 8):
        found += batch
        sizes.append(len(batch))
        await asyncio.sleep(0.001)  # work, during which more comes
    assert found == list(range(100))
    assert max(sizes) == 8


async def test_one_message_waits_for_no_other() -> None:
    more = asyncio.Event()

    async def slow() -> AsyncIterator[int]:
        yield 1
        await more.wait()
        yield 2

    batches = in_batches(slow(), 8)
    assert await anext(batches) == [1]
    more.set()
    assert await anext(batches) == [2]
    with pytest.raises(StopAsyncIteration):
        await anext(batches)


async def test_an_error_comes_after_what_came_before_it() -> None:
    found = list[int]()
    with pytest.raises(ValueError, match="broken"):
        async for batch in in_batches(numbers(5, ValueError("broken")), 2):
            found += batch
    assert found == [0, 1, 2, 3, 4]


async def test_a_reader_that_stops_leaves_no_task_behind() -> None:
    async def endless() -> AsyncIterator[int]:
        while True:
            yield 0
            await asyncio.sleep(0)

    batches = in_batches(endless(), 2)
    await anext(batches)
    await batches.aclose()  # type: ignore[attr-defined]
    assert len(asyncio.all_tasks()) == 1
