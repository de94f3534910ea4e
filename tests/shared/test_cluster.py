"""Three brokers that hold all streams: what a client does when the one that it needs dies."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from shared import feed
from shared.jetstream import Connection
from shared.transfer_queue import TransferQueue
from tests.shared.runs import open_queue, until
from tests.shared.secure import SecureBroker

RUN = "clustered"
READERS = 3
MOST = 100


async def test_a_reader_whose_consumer_was_kept_by_a_dead_node_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader's consumer is kept by one node; when that one dies, the stream lives on and the consumer is away for good."""
    for name, seconds in (("IDLE_HEARTBEAT_S", 1.0), ("SILENCE_S", 2.5), ("CHECK_S", 2.0)):
        monkeypatch.setattr(feed, name, seconds)  # it notices sooner
    with SecureBroker(tmp_path, [RUN], nodes=3) as secure:
        await secure.formed(RUN)
        connection = await Connection.open(secure.url, name="test", options=secure.options("operator"), deadline_s=60)
        queue = await open_queue(connection, RUN, broker={"replicas": 3, "max_bytes": 256 << 20})
        seen: list[list[bytes]] = []

        def all_have(*messages: bytes) -> bool:
            return all(one == list(messages) for one in seen)

        readers: list[asyncio.Task[None]] = []
        try:
            await queue.publish(queue.subjects.receipts, b"before", deadline_s=120)
            host = None
            while host is None:  # which node keeps a reader's consumer is drawn by lot
                assert len(readers) < MOST, "all readers' consumers are kept by the node that this client speaks to"
                seen += [[] for _ in range(READERS)]
                readers += [asyncio.create_task(follow(queue, one)) for one in seen[-READERS:]]
                await until(lambda: all_have(b"before"), "all readers are there", 120)
                host = await keeper_of_a_reader(connection, queue)
            await asyncio.to_thread(secure.kill, host)
            await queue.publish(queue.subjects.receipts, b"after", deadline_s=120)
            await until(lambda: all_have(b"before", b"after"), "all readers went on", 120)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            await connection.close()


async def test_readers_that_begin_when_a_node_has_just_died_find_the_others(tmp_path: Path) -> None:
    """For some seconds the cluster goes on giving consumers to the dead one, and never takes one back."""
    with SecureBroker(tmp_path, [RUN], nodes=3) as secure:
        connection = await Connection.open(secure.url, name="test", options=secure.options("operator"), deadline_s=60)
        queue = await open_queue(connection, RUN, broker={"replicas": 3, "max_bytes": 256 << 20})
        try:
            await queue.publish(queue.subjects.receipts, b"before")
            used = {channel.nc.connected_url.hostname for channel in (connection.bulk, connection.control)}
            await asyncio.to_thread(secure.kill, sorted(set(secure.hosts) - used)[0])

            async def first() -> bytes:
                async with contextlib.aclosing(queue.read("receipts", live=True)) as messages:
                    return (await anext(messages))[0]

            found = await asyncio.wait_for(asyncio.gather(*(first() for _ in range(2 * READERS))), 120)
            assert found == [b"before"] * (2 * READERS)
        finally:
            await connection.close()


async def follow(queue: TransferQueue, seen: list[bytes]) -> None:
    async for data, _ in queue.read("receipts", live=True):
        seen.append(data)


async def keeper_of_a_reader(connection: Connection, queue: TransferQueue) -> str | None:
    """A node that keeps readers' consumers and is not one that this client is connected to; None if there is none yet."""
    stream = queue.subjects.stream("receipts")
    listed = (await connection.api(f"CONSUMER.LIST.{stream}"))["consumers"]
    leaders = {consumer["cluster"].get("leader") for consumer in listed if consumer["name"].startswith("reader-")}
    own = {channel.nc.connected_url.hostname for channel in (connection.bulk, connection.control)}
    return min((leader for leader in leaders - own if leader), default=None)
