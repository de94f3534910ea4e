"""The TransferQueue's promises, against a real nats-server that is killed where it hurts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from functools import partial
from typing import Any

import pytest

from shared import wire
from shared.broker import EmbeddedBroker
from shared.errors import AckTimeout, ConsumerGone, PublishTimeout, StreamMissing
from shared.records import DeadLetter, Group, Receipt, Sampling
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue
from tests.shared.guarantees import stores_each_message_once
from tests.shared.runs import open_queue, publisher_clock_runs_ahead, until
from tests.stalls import unless_stalled


async def kill_and_restart(broker: EmbeddedBroker, pause_s: float = 0.2) -> None:
    await asyncio.to_thread(broker.kill)
    await asyncio.sleep(pause_s)
    await asyncio.to_thread(broker.start)


def a_group(group_id: str, kind: Any = "train") -> Group:
    return Group(group_id, kind, 7, 5, 3, "a prompt", None, {}, Sampling(n=2, max_new_tokens=4))


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


class TestPull:
    async def test_killed_broker_while_pulling(self, own_broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
        """Every message is handled, and none again after an ack that returned."""
        queue = await open_queue(await connect(own_broker.url), run_name)
        total = 1500
        await queue.publish_all([(queue.subjects.prompts, b"%d" % i, f"{i}") for i in range(total)])
        puller = await queue.pull("prompts", "worker", prefetch=32)
        acked: Counter[int] = Counter()
        killed = asyncio.Event()

        async def work() -> None:
            while len(acked) < total:
                if len(acked) == total - 300:
                    await killed.wait()
                delivery = await puller.next(60)
                assert delivery is not None, f"the pull went silent after {len(acked)} messages"
                await delivery.ack()
                acked[int(delivery.data)] += 1

        working = asyncio.create_task(work())
        for handled in (200, 600, 1000):
            await until(lambda count=handled: len(acked) >= count or working.done(), f"{handled} handled")
            await kill_and_restart(own_broker)
        killed.set()
        await asyncio.wait_for(working, 60)
        assert await puller.next(0.5) is None
        assert acked == Counter(range(total))
        assert (await queue.depths())["prompts"].messages == 0

    async def test_waiting_pull_wakes_up_after_a_restart(
        self, own_broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        queue = await open_queue(await connect(own_broker.url), run_name)
        puller = await queue.pull("prompts", "worker", prefetch=0)
        waiting = asyncio.create_task(puller.next(3600))
        await asyncio.sleep(0.2)
        await kill_and_restart(own_broker)
        await queue.publish(queue.subjects.prompts, b"after")
        delivery = await asyncio.wait_for(waiting, 60)
        assert delivery is not None
        assert delivery.data == b"after"

    @pytest.mark.parametrize("attempt", range(2))
    async def test_ack_that_returned_survives_sigkill(
        self, own_broker: EmbeddedBroker, connect: Any, run_name: str, attempt: int
    ) -> None:
        queue = await open_queue(await connect(own_broker.url), run_name)
        await queue.publish_all([(queue.subjects.advantages, b"%d" % i, f"{i}") for i in range(100)])
        puller = await queue.pull("advantages", "trainer", prefetch=100)
        held = [await puller.next(60) for _ in range(100)]
        await asyncio.gather(*(delivery.ack() for delivery in held[:50] if delivery))
        own_broker.kill()  # at once, in the loop's thread
        await asyncio.to_thread(own_broker.start)
        again = await queue.pull("advantages", "trainer", prefetch=100, recreate=True)
        left = [await again.next(60) for _ in range(50)]
        assert sorted(int(d.data) for d in left if d) == list(range(50, 100))
        assert await again.next(0.3) is None

    async def test_what_is_held_over_a_restart_is_handed_out_once_and_can_be_acked(
        self, own_broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        queue = await open_queue(await connect(own_broker.url), run_name)
        await queue.publish_all([(queue.subjects.prompts, b"%d" % i, f"{i}") for i in range(10)])
        puller = await queue.pull("prompts", "worker", prefetch=10, ack_wait_s=2)
        held = [await puller.next(60) for _ in range(10)]
        await kill_and_restart(own_broker)
        assert await puller.next(4) is None, "longer than the ack wait: the heartbeats go on after the restart"
        for delivery in held:
            assert delivery is not None
            assert delivery.held
            await delivery.ack()
        assert (await queue.depths())["prompts"].messages == 0

    async def test_heartbeats_hold_a_message_while_a_thread_computes(
        self, broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        connection, ack_wait_s = await connect(broker.url), 2.0

        def burn() -> int:
            until_s, n = time.monotonic() + 1.6 * ack_wait_s, 0
            while time.monotonic() < until_s:
                n += 1
            return n

        async def hold(number: int) -> None:
            queue = await open_queue(await connect(broker.url), f"{run_name}-{number}")
            other = TransferQueue(connection, queue.subjects)
            puller = await queue.pull("prompts", "worker", prefetch=0, ack_wait_s=ack_wait_s)
            await queue.publish(queue.subjects.prompts, b"x")
            delivery = await puller.next(60)
            assert delivery is not None
            rival = await other.pull("prompts", "worker", prefetch=1, ack_wait_s=ack_wait_s)
            assert await asyncio.to_thread(burn) > 0
            try:
                assert delivery.held
                assert delivery.delivered == 1
                assert await rival.next(0.1) is None
            finally:
                await delivery.ack()
                await rival.stop()
            assert not delivery.held

        await unless_stalled(hold, connection, ack_wait_s / 3)

    async def test_released_message_comes_again_after_the_ack_wait(
        self, broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        queue = await open_queue(await connect(broker.url), run_name)
        await queue.publish(queue.subjects.prompts, b"x")
        puller = await queue.pull("prompts", "worker", prefetch=0, ack_wait_s=1)
        first = await puller.next(60)
        assert first is not None
        first.release()
        assert not first.held
        second = await puller.next(60)
        assert second is not None
        assert second.delivered == 2

    async def test_nak_gives_back_at_once_or_later(self, broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
        queue = await open_queue(await connect(broker.url), run_name)
        await queue.publish(queue.subjects.prompts, b"x")
        puller = await queue.pull("prompts", "worker", prefetch=0)
        first = await puller.next(60)
        assert first is not None
        await first.nak()
        second = await puller.next(60)
        assert second is not None
        given_back = time.monotonic()
        await second.nak(delay_s=1.0)
        third = await puller.next(60)
        assert third is not None
        assert time.monotonic() - given_back > 0.8

    async def test_without_prefetch_a_busy_worker_hoards_nothing(
        self, broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        queue = await open_queue(await connect(broker.url), run_name)
        await queue.publish_all([(queue.subjects.prompts, b"%d" % i, None) for i in range(10)])
        busy = await queue.pull("prompts", "worker", prefetch=0)
        assert await busy.next(60) is not None
        idle = await queue.pull("prompts", "worker", prefetch=0)
        rest = [await idle.next(60) for _ in range(9)]
        assert all(rest)

    async def test_less_prefetch_and_stop_give_back_what_lies_ready(
        self, broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        queue = await open_queue(await connect(broker.url), run_name)
        await queue.publish_all([(queue.subjects.prompts, b"%d" % i, None) for i in range(20)])
        puller = await queue.pull("prompts", "worker", prefetch=20)
        await until(lambda: puller.ready == 20, "all lie ready")
        other = await queue.pull("prompts", "worker", prefetch=0)
        await puller.set_prefetch(5)
        assert [bool(await other.next(60)) for _ in range(15)] == [True] * 15
        await puller.stop()
        assert [bool(await other.next(60)) for _ in range(5)] == [True] * 5
        assert await puller.next(0.1) is None

    async def test_what_is_given_back_does_not_come_to_the_giver_again_and_again(
        self, broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        """It has asked for more than there is, and a delivery counts, also one that nobody sees."""
        queue = await open_queue(await connect(broker.url), run_name)
        await queue.publish_all([(queue.subjects.prompts, b"%d" % i, None) for i in range(3)])
        puller = await queue.pull("prompts", "worker", prefetch=20)
        await until(lambda: puller.ready == 3, "they lie ready")
        await puller.set_prefetch(0)
        await asyncio.sleep(0.2)
        await puller.stop()
        other = await queue.pull("prompts", "worker", prefetch=0)
        found = [await other.next(60) for _ in range(3)]
        assert [delivery.delivered for delivery in found if delivery] == [2, 2, 2]

    async def test_recreated_consumer_redelivers_at_once_and_fences_the_old_process(
        self, broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        queue = await open_queue(await connect(broker.url), run_name)
        await queue.publish_all([(queue.subjects.advantages, b"%d" % i, f"{i}") for i in range(10)])
        old = await queue.pull("advantages", "trainer", prefetch=10, recreate=True)
        held = [await old.next(60) for _ in range(10)]
        other = TransferQueue(await connect(broker.url), queue.subjects)
        new = await other.pull("advantages", "trainer", prefetch=10, recreate=True)
        again = [await new.next(60) for _ in range(10)]
        assert [d.data for d in again if d] == [d.data for d in held if d]
        with pytest.raises(ConsumerGone, match="taken over"):
            await old.next(60)
        assert held[0] is not None
        with pytest.raises(ConsumerGone):
            await held[0].ack()
        assert (await queue.depths())["advantages"].messages == 10, "the old process's ack does not count"

    async def test_ack_says_so_when_the_broker_stays_away(
        self, own_broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        queue = await open_queue(await connect(own_broker.url), run_name)
        await queue.publish(queue.subjects.prompts, b"x")
        puller = await queue.pull("prompts", "worker", prefetch=0)
        delivery = await puller.next(60)
        assert delivery is not None
        await asyncio.to_thread(own_broker.kill)
        with pytest.raises(AckTimeout, match="delivered again"):
            await delivery.ack(deadline_s=1.0)

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


class TestDeadLetters:
    async def test_an_unreadable_evaluation_is_no_drop(
        self, broker: EmbeddedBroker, connect: Any, run_name: str
    ) -> None:
        """It has no fate in the ledger, so one must not be written."""
        queue = await open_queue(await connect(broker.url), run_name)
        await queue.publish(queue.subjects.reward_requests, b"not a record", "eval-0-8")
        puller = await queue.pull("rewards", "scorer", prefetch=0)
        delivery = await puller.next(60)
        assert delivery is not None
        await queue.bury(delivery, "reward", "unreadable")
        receipts = [wire.decode(data, Receipt) async for data, _ in queue.read("receipts")]
        assert [(receipt.kind, receipt.group_id) for receipt in receipts] == [("evaluated", "eval-0-8")]

    @pytest.mark.parametrize("kind", ["train", "eval"])
    async def test_too_many_deliveries(self, broker: EmbeddedBroker, connect: Any, run_name: str, kind: Any) -> None:
        queue = await open_queue(await connect(broker.url), run_name)
        payload = wire.encode(a_group("0-7", kind))
        await queue.publish(queue.subjects.reward_requests, payload, "0-7")
        await queue.publish(queue.subjects.reward_requests, b"not a record", "0-8")
        puller = await queue.pull("rewards", "scorer", prefetch=0, max_deliveries=2, stage="reward")
        seen: Counter[str] = Counter()
        while queue.dead_lettered < 2:
            if (delivery := await puller.next(0.1)) is not None:
                seen[delivery.msg_id] += 1
                await delivery.nak()
        assert seen == {"0-7": 2, "0-8": 2}
        letters = [wire.decode(data, DeadLetter) async for data, _ in queue.read("dead")]
        assert {letter.group_id: letter.payload for letter in letters} == {"0-7": payload, "0-8": b"not a record"}
        assert all(letter.stage == "reward" and "at most 2" in letter.reason for letter in letters)
        receipts = {r.group_id: r for r in [wire.decode(d, Receipt) async for d, _ in queue.read("receipts")]}
        assert receipts["0-7"].kind == ("dropped" if kind == "train" else "evaluated")
        assert (receipts["0-7"].issue, receipts["0-7"].seat, receipts["0-7"].min_step) == (7, 5, 3)
        assert receipts["0-8"].kind == "dropped"
        assert {r.reason for r in receipts.values()} == {"dead:reward"}
        assert (await queue.depths())["rewards"].messages == 0
