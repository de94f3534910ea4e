"""What cannot be handled ends as a dead letter, with the right receipt."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from shared import wire
from shared.broker import EmbeddedBroker
from shared.records import DeadLetter, Group, Receipt, Sampling
from tests.shared.runs import open_queue


def a_group(group_id: str, kind: Any = "train") -> Group:
    return Group(group_id, kind, 7, 5, 3, "a prompt", None, {}, Sampling(n=2, max_new_tokens=4))


async def test_an_unreadable_evaluation_is_no_drop(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
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
async def test_too_many_deliveries(broker: EmbeddedBroker, connect: Any, run_name: str, kind: Any) -> None:
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
