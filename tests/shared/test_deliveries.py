"""Messages that came again, and those that were buried, are events."""

from __future__ import annotations

import asyncio

import pytest

from shared import deliveries
from shared.deliveries import Deliveries
from shared.metrics import Events
from shared.records import Event, Group, Receipt, Sampling
from shared.wire import decode, encode
from tests.shared.runs import open_queue, until


def group(name: str) -> Group:
    return Group(name, "train", 0, 0, 0, "p", "a", {}, Sampling(2, 4))


@pytest.fixture
async def queue(broker, connect, run_name):
    opened = await open_queue(await connect(broker.url), run_name)
    opened.observer = Deliveries(Events(opened, opened.subjects, "rollout", "rollout-0"))
    yield opened
    await opened.close()


async def events(queue) -> list[Event]:
    return [decode(data, Event) async for data, _ in queue.read("events")]


async def test_what_comes_again_is_told_together(queue, monkeypatch):
    monkeypatch.setattr(deliveries, "TOGETHER_S", 0.1)
    telling = asyncio.create_task(queue.observer.tell())
    for number in range(30):
        await queue.publish(queue.subjects.prompts, group(f"0-{number}"), f"0-{number}")
    puller = await queue.pull("prompts", "rollout", prefetch=0)
    held = [await puller.next(60) for _ in range(30)]
    assert await events(queue) == []
    for delivery in held:
        await delivery.nak()
    for _ in range(30):
        await (await puller.next(60)).ack()
    await until(lambda: told(queue, 30), "they are told")
    telling.cancel()
    first = (await events(queue))[0]
    assert (first.kind, first.service, first.replica) == ("redelivered", "rollout", "rollout-0")
    assert (first.detail["stage"], first.detail["most"]) == ("rollout", 2)
    assert set(first.detail["groups"]) <= {f"0-{number}" for number in range(30)}
    assert len(first.detail["groups"]) <= deliveries.IDS


async def told(queue, count: int) -> bool:
    return sum(event.detail["count"] for event in await events(queue)) == count


async def test_what_is_buried_is_a_drop_with_its_reason(queue):
    await queue.publish(queue.subjects.prompts, encode(group("0-7")), "0-7")
    puller = await queue.pull("prompts", "rollout", prefetch=0, max_deliveries=2)
    for _ in range(2):
        await (await puller.next(60)).nak()
    assert await puller.next(1) is None
    await until(lambda: _buried(queue), "it is buried")
    dropped = next(event for event in await events(queue) if event.kind == "dropped")
    assert (dropped.detail["group"], dropped.detail["reason"]) == ("0-7", "dead:rollout")
    assert "delivered 3 times, at most 2 are allowed" in dropped.detail["why"]
    receipts = [decode(data, Receipt) async for data, _ in queue.read("receipts")]
    assert [(receipt.kind, receipt.group_id, receipt.reason) for receipt in receipts] == [
        ("dropped", "0-7", "dead:rollout")
    ]


async def _buried(queue) -> bool:
    return queue.dead_lettered == 1
