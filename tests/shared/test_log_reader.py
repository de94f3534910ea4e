"""Logs are read once, in order, whole, whatever happens to the broker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.broker import EmbeddedBroker
from shared.transfer_queue import TransferQueue
from tests.shared.runs import open_queue, until


async def publish_numbers(queue: TransferQueue, first: int, last: int, subject: str | None = None) -> None:
    subject = subject or queue.subjects.receipts
    await queue.publish_all([(subject, b"%d" % i, f"n{i}") for i in range(first, last)])


async def test_ends_at_what_was_last_at_the_call(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    assert [seq async for _, seq in queue.read("receipts")] == []
    await publish_numbers(queue, 0, 1000)
    seen = []
    async for data, seq in queue.read("receipts"):
        if not seen:
            await publish_numbers(queue, 1000, 1010)
        assert seq == int(data) + 1
        seen.append(int(data))
    assert seen == list(range(1000))


async def test_starts_where_asked(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    await publish_numbers(queue, 0, 20)
    assert [seq async for _, seq in queue.read("receipts", start_seq=15)] == list(range(15, 21))
    assert [seq async for _, seq in queue.read("receipts", start_seq=21)] == []


async def test_one_subject_of_a_stream(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    for i in range(5):
        await queue.publish(queue.subjects.announced, b"a%d" % i)
        await queue.publish(queue.subjects.received, b"r%d" % i)
    found = [(data, seq) async for data, seq in queue.read("weights", subject=queue.subjects.announced)]
    assert found == [(b"a%d" % i, 2 * i + 1) for i in range(5)]
    metrics = [queue.subjects.metrics("trainer", "0"), queue.subjects.metrics("rollout", "a")]
    for subject in metrics:
        await queue.publish(subject, subject.encode())
    assert [data async for data, _ in queue.read("metrics", subject=metrics[1])] == [metrics[1].encode()]


@pytest.mark.parametrize("live", [True, False])
async def test_no_gap_and_no_repeat_over_killed_brokers(
    own_broker: EmbeddedBroker, connect: Any, run_name: str, live: bool
) -> None:
    queue = await open_queue(await connect(own_broker.url), run_name)
    total = 6000
    seen: list[int] = []
    killed = asyncio.Event()

    async def read() -> None:
        async for data, seq in queue.read("receipts", live=live):
            assert int(data) == seq - 1 == len(seen)
            seen.append(seq)
            if len(seen) == total:
                return
            if len(seen) == total - 1000:
                await killed.wait()
            await asyncio.sleep(0.001 if seq % 100 == 0 else 0)

    if not live:
        await publish_numbers(queue, 0, total)
    reading = asyncio.create_task(read())
    writing = asyncio.create_task(publish_numbers(queue, 0, total))
    for count in (100, 1500, 3000):
        await until(lambda count=count: len(seen) >= count or reading.done(), f"{count} read")
        await asyncio.to_thread(own_broker.kill)
        await asyncio.to_thread(own_broker.start)
    killed.set()
    await asyncio.wait_for(asyncio.gather(reading, writing), 60)
    assert len(seen) == total


async def test_waiting_reader_sees_what_comes_after_a_restart(
    own_broker: EmbeddedBroker, connect: Any, run_name: str
) -> None:
    queue = await open_queue(await connect(own_broker.url), run_name)
    await publish_numbers(queue, 0, 3)
    reader = queue.read("receipts", live=True)
    assert [int((await anext(reader))[0]) for _ in range(3)] == [0, 1, 2]
    waiting = asyncio.create_task(anext(reader))
    await asyncio.to_thread(own_broker.kill)
    await asyncio.to_thread(own_broker.start)
    await publish_numbers(queue, 3, 4)
    assert await asyncio.wait_for(waiting, 60) == (b"3", 4)
    await reader.aclose()


async def test_any_number_of_readers_leave_no_trace(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    await publish_numbers(queue, 0, 50)

    async def read_all() -> int:
        return len([seq async for _, seq in queue.read("receipts")])

    assert await asyncio.gather(*(read_all() for _ in range(5))) == [50] * 5
    live = queue.read("receipts", live=True)
    await anext(live)
    await live.aclose()
    stream = queue.subjects.stream("receipts")

    async def gone() -> bool:
        return (await queue.connection.api(f"CONSUMER.LIST.{stream}", {}))["total"] == 0

    await until(gone, "the readers' consumers are removed")


async def test_more_readers_than_a_thousand(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    """nats-server allows a stream no more unless it says so, and each replica reads the weights."""
    queue = await open_queue(await connect(broker.url), run_name)
    stream = queue.subjects.stream("weights")
    config = {"ack_policy": "none", "mem_storage": True, "num_replicas": 1, "inactive_threshold": 60_000_000_000}
    for number in range(1001):
        body = {"stream_name": stream, "config": {**config, "name": f"r{number}"}}
        await queue.connection.api(f"CONSUMER.CREATE.{stream}.r{number}", body)
    await queue.connection.api(f"STREAM.DELETE.{stream}")  # the broker is everybody's


async def test_log_that_forgot_its_beginning(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    await publish_numbers(queue, 0, 20)
    await queue.connection.api(f"STREAM.PURGE.{queue.subjects.stream('receipts')}", {"keep": 5})
    assert [seq async for _, seq in queue.read("receipts")] == [16, 17, 18, 19, 20]
    await queue.connection.api(f"STREAM.PURGE.{queue.subjects.stream('receipts')}", {})
    assert [seq async for _, seq in asyncio_timeout(queue.read("receipts"))] == []


async def asyncio_timeout(reader: Any) -> Any:
    async with asyncio.timeout(60):
        async for item in reader:
            yield item
