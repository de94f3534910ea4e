"""What a consumer holds, gives back and acknowledges, against a real nats-server that is killed where it hurts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from shared.broker import EmbeddedBroker
from shared.errors import AckTimeout, ConsumerGone
from shared.transfer_queue import TransferQueue
from tests.shared.runs import kill_and_restart, open_queue, until
from tests.stalls import unless_stalled


async def test_killed_broker_while_pulling(own_broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
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


async def test_waiting_pull_wakes_up_after_a_restart(own_broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
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
    own_broker: EmbeddedBroker, connect: Any, run_name: str, attempt: int
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
    own_broker: EmbeddedBroker, connect: Any, run_name: str
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
    broker: EmbeddedBroker, connect: Any, run_name: str
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
    broker: EmbeddedBroker, connect: Any, run_name: str
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


async def test_nak_gives_back_at_once_or_later(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
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
    broker: EmbeddedBroker, connect: Any, run_name: str
) -> None:
    queue = await open_queue(await connect(broker.url), run_name)
    await queue.publish_all([(queue.subjects.prompts, b"%d" % i, None) for i in range(10)])
    busy = await queue.pull("prompts", "worker", prefetch=0)
    assert await busy.next(60) is not None
    idle = await queue.pull("prompts", "worker", prefetch=0)
    rest = [await idle.next(60) for _ in range(9)]
    assert all(rest)


async def test_less_prefetch_and_stop_give_back_what_lies_ready(
    broker: EmbeddedBroker, connect: Any, run_name: str
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
    broker: EmbeddedBroker, connect: Any, run_name: str
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
    broker: EmbeddedBroker, connect: Any, run_name: str
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


async def test_ack_says_so_when_the_broker_stays_away(own_broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    queue = await open_queue(await connect(own_broker.url), run_name)
    await queue.publish(queue.subjects.prompts, b"x")
    puller = await queue.pull("prompts", "worker", prefetch=0)
    delivery = await puller.next(60)
    assert delivery is not None
    await asyncio.to_thread(own_broker.kill)
    with pytest.raises(AckTimeout, match="delivered again"):
        await delivery.ack(deadline_s=1.0)
