"""The publish window against a broker that is made of faults: nothing lost, nothing twice, nothing stuck, never too much."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import publisher as module
from shared.channel import Waiter
from shared.errors import PayloadTooLarge, PublishRefused, PublishTimeout, StorageExhausted
from shared.feed import Position, position
from shared.link import Frame
from shared.publisher import WINDOW_BYTES, WINDOW_MESSAGES, Publisher
from tests.shared.runs import until


class FakeBroker:
    """Stands in for a Channel: stores by id, and answers as `fault(attempt)` says: ok, full, 503, lost, mute or refused."""

    def __init__(self, fault: Callable[[], str]) -> None:
        self.fault = fault
        self.url, self.max_payload, self.connected = "nats://fake", 1 << 20, True
        self.patient, self.stores, self.waits = False, True, False
        self.stored: list[str] = []
        self.connection = 1
        self.under_way = self.most_under_way = self.most_bytes = self.sent = 0
        self._waiters: dict[str, Waiter] = {}
        self._listeners: list[Callable[[], None]] = []

    def on_connect(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: None

    def expect(self, waiter: Waiter) -> str:
        token = f"inbox.{len(self._waiters)}.{random.random()}".replace("0.", "")
        self._waiters[token] = waiter
        self.most_under_way = max(self.most_under_way, len(self._waiters))
        return token

    def forget(self, reply: str) -> None:
        self._waiters.pop(reply, None)

    def send(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> bool:
        self.sent += 1
        msg_id = (headers or {})["Nats-Msg-Id"]
        asyncio.get_running_loop().call_soon(self._process, self.connection, payload, reply, msg_id)
        return True

    async def request(self, subject: str, payload: bytes, deadline_s: float) -> Frame:
        return Frame("", 0, "", None, json.dumps({"streams": ["one"]}).encode())

    def reconnect(self) -> None:
        self.connection += 1
        for listener in self._listeners:
            listener()

    def _process(self, connection: int, payload: bytes, reply: str, msg_id: str) -> None:
        what = self.fault()
        if what == "mute" or connection != self.connection:  # what was on its way over an earlier connection is gone
            return
        error = {
            "full": {"code": 503, "err_code": 10077, "description": "maximum messages exceeded"},
            "starting": {"code": 503, "err_code": 10008, "description": "system temporarily unavailable"},
            "refused": {"code": 400, "err_code": 10071, "description": "wrong last sequence: 1"},
            "disk": {"code": 503, "err_code": 10077, "description": "write: no space left on device"},
        }.get(what)
        if what == "503":
            return self._answer(reply, b"", {"Status": "503"})
        if error is not None:
            return self._answer(reply, json.dumps({"error": error}).encode(), None)
        duplicate = msg_id in self.stored
        if not duplicate:
            self.stored.append(msg_id)
        if what == "lost":
            return None
        ack = {"stream": "s", "seq": self.stored.index(msg_id) + 1, "duplicate": duplicate}
        return self._answer(reply, json.dumps(ack).encode(), None)

    def _answer(self, reply: str, data: bytes, headers: dict[str, str] | None) -> None:
        waiter = self._waiters.get(reply)
        if waiter is not None:
            waiter.answer(Frame(reply, 0, "", headers, data))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACK_TIMEOUT_S", 0.02)
    monkeypatch.setattr(module, "SWEEP_S", 0.005)
    monkeypatch.setattr(module, "PROBE_S", (0.001, 0.004))


def publisher_on(broker: FakeBroker) -> Publisher:
    return Publisher(broker)  # type: ignore[arg-type]


async def send(publisher: Publisher, count: int, size: int = 1, deadline_s: float = 60.0) -> list[int]:
    entries = []
    for i in range(count):
        entries.append(await publisher.submit("run.prompts", bytes(size), {"Nats-Msg-Id": f"{i}"}, deadline_s))
    return await publisher.wait_all(entries)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 120),
    faults=st.lists(st.sampled_from(["full", "503", "starting", "lost", "mute"]), max_size=4),
)
def test_whatever_goes_wrong_each_message_is_stored_once(seed: int, count: int, faults: list[str]) -> None:
    draw = random.Random(seed)
    broker = FakeBroker(lambda: draw.choice(["ok", "ok", *faults]))

    async def run() -> None:
        publisher = publisher_on(broker)
        sequences = await asyncio.wait_for(send(publisher, count), 60)
        assert sorted(sequences) == list(range(1, count + 1))
        assert sorted(broker.stored, key=int) == [f"{i}" for i in range(count)]
        assert broker.most_under_way <= WINDOW_MESSAGES
        assert not broker._waiters, "no waiter stays behind"
        publisher.close()

    asyncio.run(run())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 200))
def test_order_survives_reconnects(seed: int, count: int) -> None:
    """A broker that dies loses what it had not stored and every answer under way, and the messages behind it as well."""
    draw = random.Random(seed)
    dead = False

    def fault() -> str:
        nonlocal dead
        if not dead and draw.random() < 0.05:
            dead = True
            asyncio.get_running_loop().call_later(0.005, come_back)
            return draw.choice(["lost", "mute"])
        return "mute" if dead else "ok"

    def come_back() -> None:
        nonlocal dead
        dead = False
        broker.reconnect()

    broker = FakeBroker(fault)

    async def run() -> None:
        module.ACK_TIMEOUT_S = 5.0
        publisher = publisher_on(broker)
        assert await asyncio.wait_for(send(publisher, count), 60) == list(range(1, count + 1))
        publisher.close()

    asyncio.run(run())


async def test_window_is_bounded_in_bytes() -> None:
    broker = FakeBroker(lambda: "mute")
    publisher = publisher_on(broker)
    size = 1 << 20
    sending = asyncio.create_task(send(publisher, 40, size))
    await asyncio.sleep(0.1)
    assert len(broker._waiters) == WINDOW_BYTES // size
    sending.cancel()
    publisher.close()


async def test_full_stream_is_probed_by_one_message() -> None:
    broker = FakeBroker(lambda: "full")
    publisher = publisher_on(broker)
    sending = asyncio.create_task(send(publisher, 50))
    await asyncio.sleep(0.05)
    first_round = broker.sent
    assert first_round <= 50 + 20
    await asyncio.sleep(0.2)
    assert broker.sent - first_round <= 0.2 / 0.004 + 10
    broker.fault = lambda: "ok"
    assert await asyncio.wait_for(sending, 60) == list(range(1, 51)), "in order, for nothing was stored in between"
    publisher.close()


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("refused", PublishRefused, r"'run.prompts'.*wrong last sequence.*10071"),
        ("disk", StorageExhausted, r"no room for 'run.prompts'.*no space left"),
        ("mute", PublishTimeout, r"'run.prompts': not stored within .*no answer"),
        ("full", PublishTimeout, r"the stream is full: maximum messages"),
        ("503", PublishTimeout, r"503: no stream takes this subject"),
    ],
)
async def test_every_failure_is_an_error_that_names_the_subject(fault: str, error: type[Exception], text: str) -> None:
    publisher = publisher_on(broker := FakeBroker(lambda: fault))
    with pytest.raises(error, match=text):
        await asyncio.wait_for(send(publisher, 3, deadline_s=0.1), 60)
    assert not broker._waiters
    publisher.close()


async def test_the_reason_for_waiting_is_told_also_while_a_probe_is_under_way() -> None:
    publisher = publisher_on(broker := FakeBroker(lambda: "full"))
    sending = asyncio.create_task(send(publisher, 1, deadline_s=0.1))
    await until(lambda: publisher.refused_full, "it is known to be full")
    broker.send = lambda *_: True  # type: ignore[method-assign]  # probes from here on are on their way for ever
    module.ACK_TIMEOUT_S = 60.0
    with pytest.raises(PublishTimeout, match=r"the stream is full: maximum messages"):
        await asyncio.wait_for(sending, 60)
    publisher.close()


async def test_broker_that_answers_but_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MUTE_S", 0.1)
    publisher = publisher_on(FakeBroker(lambda: "mute"))
    with pytest.raises(StorageExhausted, match=r"disk is full or broken"):
        await asyncio.wait_for(send(publisher, 3), 60)
    publisher.close()


async def test_a_patient_service_waits_for_a_disk_to_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MUTE_S", 0.1)
    broker = FakeBroker(lambda: "mute")
    broker.patient = True
    publisher = publisher_on(broker)
    work = asyncio.create_task(send(publisher, 3))
    await until(lambda: not broker.stores, "it is noticed")
    assert not work.done()
    broker.fault = lambda: "ok"
    broker.reconnect()
    await asyncio.wait_for(work, 60)
    assert broker.stores
    publisher.close()


async def test_too_large_for_the_broker() -> None:
    publisher = publisher_on(FakeBroker(lambda: "ok"))
    with pytest.raises(PayloadTooLarge, match="1048577 bytes exceed the broker's max_payload of 1048576"):
        await publisher.publish("run.prompts", bytes((1 << 20) + 1), {}, 1.0)
    publisher.close()


async def test_failure_of_one_does_not_hold_the_others() -> None:
    answers = iter(["ok", "refused", "ok"])
    publisher = publisher_on(broker := FakeBroker(lambda: next(answers)))
    with pytest.raises(PublishRefused):
        await send(publisher, 3)
    assert broker.stored == ["0", "2"]
    publisher.close()


@given(
    delivered=st.integers(1, 10**6),
    seq=st.integers(1, 2**63),
    consumer_seq=st.integers(1, 2**63),
    pending=st.integers(0, 2**63),
    name=st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True),
)
def test_position_of_both_reply_forms(delivered: int, seq: int, consumer_seq: int, pending: int, name: str) -> None:
    expected = Position(delivered, seq, consumer_seq, pending)
    tail = f"{name}_prompts.{name}.{delivered}.{seq}.{consumer_seq}.1795974208306476746.{pending}"
    assert position(f"$JS.ACK.{tail}") == expected
    assert position(f"$JS.ACK._.ACCOUNT.{tail}.token") == expected


@pytest.mark.parametrize("reply", ["", "a.b", "$JS.ACK.s.c.1.2", "_INBOX.a.b.c.d.e.f.g.h.i", "$JS.ACK.s.c.x.1.1.1.1"])
def test_position_of_anything_else(reply: str) -> None:
    with pytest.raises(ValueError):
        position(reply)
