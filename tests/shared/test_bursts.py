"""A burst for many waiting slots: each message goes to one of them, and none is given back and counted as delivered again."""

from __future__ import annotations

import asyncio
from typing import Any

from shared.broker import EmbeddedBroker
from shared.link import Frame
from shared.pull import Puller
from tests.shared.runs import open_queue, until

SLOTS, ROUNDS = 16, 8


async def test_no_message_of_a_burst_is_delivered_twice(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    pullers = [await queue.pull("prompts", "worker", prefetch=0, max_deliveries=5) for _ in range(2)]
    deliveries: list[int] = []

    async def slot(puller: Puller) -> None:
        while True:
            delivery = await puller.next(
                0.05
            )  # short, so that many slots run out of time at once, as they do at a lull
            if delivery is not None:
                deliveries.append(delivery.delivered)
                await delivery.ack()

    slots = [asyncio.create_task(slot(puller)) for puller in pullers for _ in range(SLOTS)]
    for number in range(1, ROUNDS + 1):
        messages = [(queue.subjects.prompts, b"x", f"{number}-{index}") for index in range(2 * SLOTS)]
        await queue.publish_all(messages)
        wanted = 2 * SLOTS * number
        await until(lambda wanted=wanted: len(deliveries) >= wanted, "the burst is taken")
    for task in slots:
        task.cancel()
    await asyncio.gather(*slots, return_exceptions=True)
    for puller in pullers:
        await puller.stop()
    assert deliveries == [1] * (2 * SLOTS * ROUNDS)


async def test_a_cancelled_waiter_hands_its_message_on(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    puller = await queue.pull("prompts", "worker", prefetch=0)
    first, second = (asyncio.create_task(puller.next(60)) for _ in range(2))
    await asyncio.sleep(0)  # both wait now
    await queue.publish(queue.subjects.prompts, b"x", "1")
    await until(lambda: puller.ready or first.done() or second.done(), "the message is here")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    winner = second if first.cancelled() else first
    async with asyncio.timeout(60):
        delivery = await winner
    assert delivery is not None
    await delivery.ack()
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await puller.stop()


async def test_a_copy_that_was_on_its_way_when_the_ack_returned(
    broker: EmbeddedBroker, connect: Any, run_name: str
) -> None:
    """A broker that is slow, or that was killed and forgot the ack, delivers once more: the copy is answered, not handed out."""
    queue = await open_queue(await connect(broker.url), run_name)
    puller = await queue.pull("prompts", "worker", prefetch=0)
    await queue.publish(queue.subjects.prompts, b"x", "1")
    delivery = await puller.next(60)
    assert delivery is not None
    reply = delivery._reply
    await delivery.ack()
    copy = Frame(delivery.subject, 0, reply.replace("worker.1.", "worker.2."), {"Nats-Msg-Id": "1"}, b"x")
    puller._on_message(copy)
    assert puller.ready == 0
    assert puller.redelivered == 1
    await queue.publish(queue.subjects.prompts, b"y", "2")
    after = await puller.next(60)
    assert after is not None
    assert after.data == b"y"
    assert after.delivered == 1
    await after.ack()
    reused = Frame(delivery.subject, 0, reply, {"Nats-Msg-Id": "another"}, b"z")
    puller._on_message(reused)
    assert puller.ready == 1, "another message under the same number, as after a power cut, is no copy"
    await puller.stop()
