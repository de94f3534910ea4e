"""Payloads above the message limit: stored once, checked on read, gone when nobody needs them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import wire
from shared.blobs import PART_BYTES, cut, parts_of
from shared.broker import EmbeddedBroker
from shared.errors import BlobCorrupt, BlobMissing, PublishTimeout
from shared.records import BlobRef, DeadLetter
from shared.streams import MESSAGE_LIMIT
from shared.transfer_queue import TransferQueue
from tests.shared.runs import open_queue, publisher_clock_runs_ahead, until

BIG = bytes(range(256)) * (2 * PART_BYTES // 256) + b"the tail"


@given(st.integers(0, 3 * PART_BYTES + 2))
def test_parts_cover_the_payload(size: int) -> None:
    parts = cut(bytes(size))
    assert len(parts) == parts_of(size) >= 1
    assert sum(map(len, parts)) == size
    assert all(len(part) <= PART_BYTES for part in parts)
    assert all(len(part) == PART_BYTES for part in parts[:-1])


async def stored(queue: TransferQueue, stream: str) -> int:
    return (await queue.depths())[stream].messages


async def test_large_payload_arrives_whole_and_is_gone_after_the_ack(
    broker: EmbeddedBroker, connect: Any, run_name: str
) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    await queue.publish(queue.subjects.advantages, BIG, "g")
    await queue.publish(queue.subjects.advantages, b"s" * MESSAGE_LIMIT, "small")
    assert await stored(queue, "blobs") == 3
    assert await stored(queue, "advantages") == 2
    puller = await queue.pull("advantages", "trainer", prefetch=2)
    found = {}
    for _ in range(2):
        delivery = await puller.next(60)
        assert delivery is not None
        found[delivery.msg_id] = delivery.data
        await delivery.ack()
    assert found == {"g": BIG, "small": b"s" * MESSAGE_LIMIT}
    assert await stored(queue, "blobs") == 0


async def test_stored_once_per_content(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    for i in range(3):
        await queue.publish(queue.subjects.advantages, BIG, f"g{i}")
    assert await stored(queue, "blobs") == 3, "three parts, not nine"
    assert await stored(queue, "advantages") == 3


async def test_repeated_message_leaves_no_blob_behind(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    puller = await queue.pull("advantages", "trainer", prefetch=0)
    await queue.publish(queue.subjects.advantages, BIG, "g")
    delivery = await puller.next(60)
    assert delivery is not None
    await delivery.ack()
    await queue.publish(queue.subjects.advantages, BIG, "g")  # a worker that died before its own ack does this

    async def clean() -> bool:
        return await stored(queue, "blobs") == 0

    await until(clean, "the blob of the repetition is removed")
    assert await stored(queue, "advantages") == 0


async def test_log_keeps_its_payloads_apart(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    await queue.publish(queue.subjects.trajectory("x"), BIG, "g")
    await queue.publish(queue.subjects.trajectory("x"), b"small", "h")
    assert (await stored(queue, "blobs"), await stored(queue, "archive")) == (0, 3)
    assert [data async for data, _ in queue.read("trajectories")] == [BIG, b"small"]
    assert await queue.last(queue.subjects.trajectory("x")) == (b"small", 2)
    await queue.publish(queue.subjects.trajectory("x"), BIG, "i")
    assert await queue.last(queue.subjects.trajectory("x")) == (BIG, 3)
    assert await stored(queue, "archive") == 3


async def test_log_whose_payload_aged_out_says_so(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    await queue.publish(queue.subjects.trajectory("x"), BIG, "g")
    await queue.publish(queue.subjects.trajectory("x"), b"small", "h")
    await queue.connection.api(f"STREAM.PURGE.{queue.subjects.stream('archive')}", {})
    with pytest.raises(BlobMissing, match="part 1 of 3 is not in the blob stream"):
        _ = [data async for data, _ in queue.read("trajectories")]
    assert [data async for data, _ in queue.read("trajectories", start_seq=2)] == [b"small"]


async def damage(queue: TransferQueue, how: str) -> None:
    subject = queue.subjects.blob(hashlib.sha256(BIG).hexdigest(), 1)
    if how == "missing":
        await queue.connection.api(f"STREAM.PURGE.{queue.subjects.stream('blobs')}", {"filter": subject})
    else:
        await queue.connection.bulk.request(subject, b"x" * PART_BYTES, 5.0)


@pytest.mark.parametrize("how", ["missing", "corrupt"])
async def test_damaged_blob_is_an_error_and_comes_again(
    broker: EmbeddedBroker, connect: Any, run_name: str, how: str, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr("shared.transfer_queue.BLOB_RETRY_S", 0.3)
    caplog.set_level(logging.ERROR)
    queue = await open_queue(await connect(broker.url), run_name)
    await queue.publish(queue.subjects.advantages, BIG, "g")
    await damage(queue, how)
    ref = BlobRef(hashlib.sha256(BIG).hexdigest(), len(BIG), 3)
    with pytest.raises(BlobMissing if how == "missing" else BlobCorrupt, match=ref.sha256):
        await queue.blobs.get("advantages", ref)
    puller = await queue.pull("advantages", "trainer", prefetch=1)
    await until(lambda: queue.blob_failures >= 2, "the message is tried again")
    assert await puller.next(0.01) is None, "a worker never sees a payload that is not what was sent"
    assert any(ref.sha256 in record.getMessage() for record in caplog.records)
    for i in range(3):  # repaired: the next delivery goes through
        part = cut(BIG)[i]
        await queue.connection.bulk.request(queue.subjects.blob(ref.sha256, i), part, 5.0)
    delivery = await puller.next(60)
    assert delivery is not None
    assert delivery.data == BIG


async def test_damaged_blob_ends_in_the_dead_letters(
    broker: EmbeddedBroker, connect: Any, run_name: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("shared.transfer_queue.BLOB_RETRY_S", 0.0)
    queue = await open_queue(await connect(broker.url), run_name)
    await queue.publish(queue.subjects.advantages, BIG, "g")
    await damage(queue, "missing")
    await queue.pull("advantages", "trainer", prefetch=1, max_deliveries=2)
    await until(lambda: queue.dead_lettered == 1, "buried")
    (letter,) = [wire.decode(data, DeadLetter) async for data, _ in queue.read("dead")]
    assert "is not in the blob stream" in letter.reason
    assert letter.group_id == "g"


async def test_dead_letter_of_a_large_message_is_whole(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    await queue.publish(queue.subjects.advantages, BIG, "g")
    puller = await queue.pull("advantages", "trainer", prefetch=0, max_deliveries=1)
    delivery = await puller.next(60)
    assert delivery is not None
    await delivery.nak()
    waiting = asyncio.create_task(puller.next(60))
    await until(lambda: queue.dead_lettered == 1, "buried")
    waiting.cancel()
    (letter,) = [wire.decode(data, DeadLetter) async for data, _ in queue.read("dead")]
    assert letter.payload == BIG
    assert await stored(queue, "blobs") == 0


async def test_full_blob_stream_makes_the_publisher_wait(
    broker: EmbeddedBroker, connect: Any, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    stream = queue.subjects.stream("blobs")
    info = await queue.connection.api(f"STREAM.INFO.{stream}")
    await queue.connection.api(f"STREAM.UPDATE.{stream}", info["config"] | {"max_bytes": 3 * PART_BYTES})
    await queue.publish(queue.subjects.advantages, BIG, "g")
    other = BIG[::-1]
    waiting = asyncio.create_task(queue.publish(queue.subjects.advantages, other, "h", deadline_s=300))
    await until(lambda: queue.publish_refusals, "it is refused")
    with monkeypatch.context() as patch:
        publisher_clock_runs_ahead(patch, 300)
        with pytest.raises(PublishTimeout, match="the stream is full"):
            await asyncio.wait_for(waiting, 60)
    waiting = asyncio.create_task(queue.publish(queue.subjects.advantages, other, "h"))
    puller = await queue.pull("advantages", "trainer", prefetch=0)
    first = await puller.next(60)
    assert first is not None
    await first.ack()
    await asyncio.wait_for(waiting, 60)
    second = await puller.next(60)
    assert second is not None
    assert second.data == other


async def test_large_payload_over_a_killed_broker(own_broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(own_broker.url), run_name)
    payloads: dict[str, bytes] = {}
    killed = False

    def messages() -> Iterator[tuple[str, bytes, str]]:
        while not killed:
            number = len(payloads)
            payloads[f"g{number}"] = bytes([number % 256]) * (MESSAGE_LIMIT + number + 1)
            yield queue.subjects.advantages, payloads[f"g{number}"], f"g{number}"

    work = asyncio.create_task(queue.publish_all(messages()))
    await until(lambda: stored_some(queue), "some are stored")
    await asyncio.to_thread(own_broker.kill)
    killed = True
    await asyncio.to_thread(own_broker.start)
    await asyncio.wait_for(work, 60)
    puller = await queue.pull("advantages", "trainer", prefetch=2)
    found = {}
    while len(found) < len(payloads):
        delivery = await puller.next(60)
        assert delivery is not None
        found[delivery.msg_id] = delivery.data
        await delivery.ack()
    assert found == payloads
    assert await stored(queue, "blobs") == 0


async def stored_some(queue: TransferQueue) -> bool:
    return await stored(queue, "blobs") >= 4
