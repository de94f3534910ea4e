"""Three brokers that hold all streams: what a client does when the one that it needs dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shared.jetstream import Connection
from shared.transfer_queue import TransferQueue
from tests.shared.runs import open_queue, until
from tests.shared.secure import SecureBroker

RUN = "clustered"
READERS = 6


async def test_a_reader_whose_consumer_was_kept_by_a_dead_node_goes_on(tmp_path: Path) -> None:
    """A reader's consumer is kept by one node; when that one dies, the stream lives on and the consumer is away for good."""
    with SecureBroker(tmp_path, [RUN], nodes=3) as secure:
        connection = await Connection.open(secure.url, name="test", options=secure.options("operator"), deadline_s=60)
        queue = await open_queue(connection, RUN, broker={"replicas": 3, "max_bytes": 256 << 20})
        seen: list[list[bytes]] = [[] for _ in range(READERS)]
        readers = [asyncio.create_task(follow(queue, one)) for one in seen]
        try:
            await queue.publish(queue.subjects.receipts, b"before")
            await until(lambda: all(one == [b"before"] for one in seen), "all readers are there", 60)
            host = await keeper_of_a_reader(connection, queue)
            await asyncio.to_thread(secure.kill, host)
            await queue.publish(queue.subjects.receipts, b"after", deadline_s=60)
            await until(lambda: all(one == [b"before", b"after"] for one in seen), "all readers went on", 60)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            await connection.close()


async def follow(queue: TransferQueue, seen: list[bytes]) -> None:
    async for data, _ in queue.read("receipts", live=True):
        seen.append(data)


async def keeper_of_a_reader(connection: Connection, queue: TransferQueue) -> str:
    """A node that keeps readers' consumers and is not the one that this client is connected to."""
    stream = queue.subjects.stream("receipts")
    listed = (await connection.api(f"CONSUMER.LIST.{stream}"))["consumers"]
    leaders = {consumer["cluster"]["leader"] for consumer in listed if consumer["name"].startswith("reader-")}
    others = leaders - {connection.bulk.nc.connected_url.hostname}
    assert others, f"all readers' consumers are kept by the node that this client speaks to: {leaders}"
    return sorted(others)[0]
