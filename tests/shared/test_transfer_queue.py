"""The TransferQueue's promises to who publishes, against a real nats-server that is killed where it hurts."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import pytest

from shared.broker import EmbeddedBroker
from shared.errors import PublishTimeout, StreamMissing
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue
from tests.shared.guarantees import stores_each_message_once
from tests.shared.runs import kill_and_restart, open_queue, publisher_clock_runs_ahead, until


async def drain(
    queue: TransferQueue, stream: str, durable: str, filled: asyncio.Future[Any] | None = None
) -> list[bytes]:
    """Pull and ack until the stream is empty and who still fills it has done so."""
    puller = await queue.pull(stream, durable, prefetch=16)
    found = []
    async with asyncio.timeout(120):
        while (filled is not None and not filled.done()) or (await queue.depths())[stream].messages:
            if (delivery := await puller.next(0.5)) is not None:
                found.append(delivery.data)
                await delivery.ack()
    await puller.stop()
    return found


class TestPublish:
    async def test_one_id_is_stored_once(self, broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
        queue = await open_queue(await connect(broker.url), run_name)
        prompts = queue.subjects.prompts
        first = await queue.publish(prompts, b"one", "id-1")
        assert await queue.publish(prompts, b"one again", "id-1") == first
        assert await queue.publish(prompts, b"two") == first + 1
        assert await queue.publish(prompts, b"two") == first + 2
        assert await drain(queue, "prompts", "worker") == [b"one", b"two", b"two"]

    async def test_id_is_known_after_the_message_was_consumed(
        self, broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        queue = await open_queue(await connect(broker.url), run_name)
        await queue.publish(queue.subjects.prompts, b"one", "id-1")
        assert await drain(queue, "prompts", "worker") == [b"one"]
        await queue.publish(queue.subjects.prompts, b"one", "id-1")
        assert await drain(queue, "prompts", "worker") == []

    async def test_many_keep_their_order(self, broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
        queue = await open_queue(await connect(broker.url), run_name)
        messages = [(queue.subjects.receipts, b"%d" % i, f"{i}") for i in range(500)]
        assert await queue.publish_all(messages) == list(range(1, 501))
        assert [int(data) async for data, _ in queue.read("receipts")] == list(range(500))

    async def test_killed_broker_while_publishing_stores_each_once(
        self, own_broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        queue = await open_queue(await connect(own_broker.url), run_name)
        await stores_each_message_once(queue, partial(kill_and_restart, own_broker), 3)

    async def test_full_stream_makes_the_publisher_wait_with_one_probe(
        self, broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        queue = await open_queue(await connect(broker.url), run_name)
        stream = queue.subjects.stream("prompts")
        info = await queue.connection.api(f"STREAM.INFO.{stream}")
        await queue.connection.api(f"STREAM.UPDATE.{stream}", info["config"] | {"max_msgs": 20})
        total = 300
        messages = [(queue.subjects.prompts, b"%d" % i, f"{i}") for i in range(total)]
        work = asyncio.create_task(queue.publish_all(messages))
        depth = queue.depths
        await until(lambda: queue.publish_refusals, "the stream is full")
        assert (await depth())["prompts"].messages == 20
        before = queue.publish_refusals
        await asyncio.sleep(1.0)
        assert queue.publish_refusals - before < 64 + 25, "one message probes, four times a second; the window does not"
        assert not work.done()
        found = await drain(queue, "prompts", "worker", work)
        assert len(await work) == total
        assert Counter(int(data) for data in found) == Counter(range(total))

    async def test_full_stream_ends_in_an_error_at_the_deadline(
        self, broker: EmbeddedBroker, connect: Any, run_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        queue = await open_queue(await connect(broker.url), run_name)
        stream = queue.subjects.stream("prompts")
        info = await queue.connection.api(f"STREAM.INFO.{stream}")
        await queue.connection.api(f"STREAM.UPDATE.{stream}", info["config"] | {"max_msgs": 1})
        await queue.publish(queue.subjects.prompts, b"fills it")
        waiting = asyncio.create_task(queue.publish(queue.subjects.prompts, b"too much", deadline_s=300))
        await until(lambda: queue.publish_refusals, "it is refused")
        publisher_clock_runs_ahead(monkeypatch, 300)
        with pytest.raises(PublishTimeout, match=r"prompts.*the stream is full: maximum messages"):
            await asyncio.wait_for(waiting, 60)

    async def test_deadline_holds_while_the_broker_is_away(
        self, own_broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        queue = await open_queue(await connect(own_broker.url), run_name)
        await asyncio.to_thread(own_broker.kill)
        with pytest.raises(PublishTimeout, match="not connected"):
            await asyncio.wait_for(queue.publish(queue.subjects.prompts, b"x", deadline_s=1.0), 60)

    async def test_a_patient_service_waits_out_an_outage_longer_than_its_deadlines(
        self, own_broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        connection = await connect(own_broker.url)
        connection.be_patient()
        queue = await open_queue(connection, run_name)
        await queue.publish(queue.subjects.prompts, b"first", "first")
        puller = await queue.pull("prompts", "worker", prefetch=1)
        held = await puller.next(60)
        assert held is not None
        await asyncio.to_thread(own_broker.kill)
        await until(lambda: not connection.connected, "the outage is noticed")
        many = [(queue.subjects.prompts, b"later", str(number)) for number in range(100)]  # more than a window
        deadline_s = 4.0  # it runs on when the broker is back
        work = [queue.publish_all(many, deadline_s=deadline_s), held.ack(deadline_s)]
        waiting = [asyncio.ensure_future(one) for one in work]
        await asyncio.sleep(deadline_s + 1.0)
        assert not any(one.done() for one in waiting)
        await asyncio.to_thread(own_broker.restart)
        await asyncio.wait_for(asyncio.gather(*waiting), 60)
        assert (await queue.depths())["prompts"].messages == 100

    async def test_subject_without_a_stream(
        self, broker: EmbeddedBroker, connect: Any, run_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("shared.publisher.MISSING_AFTER_S", 0.5)
        queue = TransferQueue(await connect(broker.url), Subjects(run_name))
        with pytest.raises(StreamMissing, match=f"{run_name}.prompts.*not set up"):
            await queue.publish(queue.subjects.prompts, b"x")
        with pytest.raises(StreamMissing):
            await queue.pull("prompts", "worker", prefetch=1)
        with pytest.raises(StreamMissing):
            _ = [seq async for _, seq in queue.read("receipts")]
        with pytest.raises(ValueError, match="no subject of run"):
            await queue.publish("other.prompts", b"x")

    async def test_cancelled_publish_frees_its_place(
        self, own_broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        queue = await open_queue(await connect(own_broker.url), run_name)
        await asyncio.to_thread(own_broker.kill)
        waiting = [asyncio.create_task(queue.publish(queue.subjects.prompts, b"lost", f"{i}")) for i in range(200)]
        await asyncio.sleep(0.2)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.to_thread(own_broker.start)
        await asyncio.wait_for(queue.publish(queue.subjects.prompts, b"after", "after"), 60)
        assert (await drain(queue, "prompts", "worker"))[-1] == b"after"

    async def test_metrics_never_wait_and_never_raise(
        self, own_broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        queue = await open_queue(await connect(own_broker.url), run_name)
        subject = queue.subjects.metrics("trainer", "0")
        queue.emit(subject, b"1")
        await until(lambda: queue.last(subject), "the metric is stored")
        queue.emit(subject, b"x" * (2 << 20))
        assert queue.emit_dropped == 1
        await asyncio.to_thread(own_broker.kill)
        await until(lambda: not queue.connection.connected, "the loss is seen")
        queue.emit(subject, b"2")
        assert queue.emit_dropped == 2
        await asyncio.to_thread(own_broker.start)
        await until(lambda: queue.connection.connected, "connected again")
        queue.emit(subject, b"3")

        async def third() -> bool:
            return (await queue.last(subject) or (b"", 0))[0] == b"3"

        await until(third, "the metric after the restart is stored")

    async def test_two_runs_do_not_meet(self, broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
        one = await open_queue(await connect(broker.url), run_name)
        two = await open_queue(await connect(broker.url), f"{run_name}-2")
        await one.publish(one.subjects.prompts, b"one", "same-id")
        await two.publish(two.subjects.prompts, b"two", "same-id")
        assert await drain(one, "prompts", "worker") == [b"one"]
        assert await drain(two, "prompts", "worker") == [b"two"]

    async def test_depths_and_last(self, broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
        queue = await open_queue(await connect(broker.url), run_name)
        assert await queue.last(queue.subjects.announced) is None
        await queue.publish(queue.subjects.announced, b"v1")
        await queue.publish(queue.subjects.received, b"r1")
        await queue.publish(queue.subjects.announced, b"v2")
        assert await queue.last(queue.subjects.announced) == (b"v2", 3)
        await queue.publish_all([(queue.subjects.prompts, b"x", None) for _ in range(5)])
        puller = await queue.pull("prompts", "worker", prefetch=0)
        assert await puller.next(60)
        depth = (await queue.depths())["prompts"]
        assert (depth.messages, depth.pending, depth.ack_pending) == (5, 4, 1)


class TestOnce:
    async def test_a_subject_takes_one_message_for_good(
        self, broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        """The duplicate window forgets an id after a while, and two copies of a group could get two fates."""
        queue = await open_queue(await connect(broker.url), run_name)
        one, two = queue.subjects.trajectory("0-1"), queue.subjects.trajectory("0-1.1")
        assert await queue.publish(one, b"first", "a", once=True) == 1
        assert await queue.publish(two, b"other", "b", once=True) == 2
        assert await queue.publish(one, b"second", "another id", once=True) == 1
        assert await queue.publish(one, b"second", "a", once=True) == 1
        assert [data async for data, _ in queue.read("trajectories")] == [b"first", b"other"]

    async def test_a_large_one_too(self, broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
        queue = await open_queue(await connect(broker.url), run_name)
        subject = queue.subjects.trajectory("0-1")
        assert await queue.publish(subject, b"1" * (2 << 20), "a", once=True) == 1
        assert await queue.publish(subject, b"2" * (2 << 20), "b", once=True) == 1
        assert [data[:1] async for data, _ in queue.read("trajectories")] == [b"1"]
