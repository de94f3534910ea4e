"""Acknowledged publishing: a bounded window a subject, the same id on every try, back-pressure by waiting.

Guarantees: every message ends in its stream's sequence number or in an exception; a message is sent again, with the same
`Nats-Msg-Id`, until the broker has stored it exactly once or its deadline passes (which, on a patient channel, does not run
while the broker is away or its disk is full); a full stream makes the lane wait, with one message probing, instead of the whole
window hammering; messages of one subject are first sent, and after a reconnect sent again, in the order in which they were
submitted. (With a full stream several messages may be under way when room appears, so strict order there needs a caller that
awaits each publish.)

The window, the gate and their order are held by tests/shared/test_publisher.py, the promises over SIGKILL of the broker by
tests/shared/test_transfer_queue.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from dataclasses import dataclass, field
from typing import Any

from shared.channel import Channel, redact, status_of
from shared.errors import (
    ApiError,
    PayloadTooLarge,
    PublishRefused,
    PublishTimeout,
    StorageExhausted,
    StreamMissing,
    TransportError,
)
from shared.jetstream import api_error
from shared.link import Frame

log = logging.getLogger("slipstream.transport")

WINDOW_MESSAGES = 64
WINDOW_BYTES = 16 << 20
ACK_TIMEOUT_S = 5.0
MUTE_S = 20.0
"""So long without any answer to a message on a connection that stands, and the broker is asked what is the matter."""
SWEEP_S = 0.5
PROBE_S = (0.05, 0.25)
"""First and longest pause between two probes of a full stream."""
MISSING_AFTER_S = 3.0
"""So long "nobody listens" is taken for a broker that is starting; then it is asked whether the stream exists at all."""

STORE_FAILED = 10077
"""JetStream's one code for everything that kept a message out of a stream; the text tells a limit from a broken disk."""

WRONG_LAST = 10071
"""The subject has a message already, and the publisher asked for it to be the first."""
ONCE = {"Nats-Expected-Last-Subject-Sequence": "0", "Slipstream-Once": "1"}
"""Headers of a message that is stored only as the first of its subject, for as long as that one is kept; the second tells it from
a KV create, for which not being the first is an error."""

UNSENT, SENT, DONE = range(3)
NO_ANSWER = "no answer"


class Entry:
    """One message under way."""

    __slots__ = (
        "deadline",
        "duplicate",
        "future",
        "headers",
        "lane",
        "payload",
        "reply",
        "seen",
        "sends",
        "sent_at",
        "silent_since",
        "started",
        "state",
        "subject",
    )

    def __init__(self, lane: Lane, subject: str, payload: bytes, headers: dict[str, str], deadline: float) -> None:
        self.lane, self.subject, self.payload, self.headers, self.deadline = lane, subject, payload, headers, deadline
        self.future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.state, self.sent_at, self.started = UNSENT, 0.0, time.monotonic()
        self.silent_since = 0.0
        """When it was first sent over the present connection without having had any answer since; 0: not."""
        self.seen = "not sent yet"
        self.reply = ""
        self.duplicate = False
        self.sends = 0
        """How often it was handed to the socket. A duplicate that was sent once was stored by somebody else before."""

    def answer(self, frame: Frame) -> None:
        self.lane.publisher.on_answer(self, frame)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True)
class Lane:
    """The messages under way to one subject, in the order of submission."""

    publisher: Publisher
    entries: dict[int, Entry] = field(default_factory=dict)
    bytes: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    blocked: bool = False
    """The stream is full or absent: one entry probes, the others wait."""
    probe: asyncio.TimerHandle | None = None
    probe_s: float = PROBE_S[0]
    blocked_since: float = 0.0
    counter: int = 0

    def has_room(self, size: int) -> bool:
        return not self.entries or (len(self.entries) < WINDOW_MESSAGES and self.bytes + size <= WINDOW_BYTES)

    def half_empty(self) -> bool:
        """Then whoever waits is woken, to send a burst: waking up for every single ack costs more than sending."""
        return len(self.entries) <= WINDOW_MESSAGES // 2 and self.bytes <= WINDOW_BYTES // 2

    def unsent(self, limit: int) -> list[Entry]:
        found = []
        for entry in self.entries.values():
            if entry.state == UNSENT:
                found.append(entry)
                if len(found) == limit:
                    break
        return found


class Publisher:
    """Publishes over one channel. `submit` then `wait`, or `publish` for both."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.resent = self.refused_full = self.duplicates = 0
        self._lanes: dict[str, Lane] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unlisten = channel.on_connect(self._on_connect)

    async def publish(self, subject: str, payload: bytes, headers: dict[str, str], deadline_s: float) -> int:
        return await self.wait(await self.submit(subject, payload, headers, deadline_s))

    async def submit(
        self, subject: str, payload: bytes, headers: dict[str, str], deadline_s: float, *, lane_of: str | None = None
    ) -> Entry:
        """Wait for room in the window and send. The caller must `wait` for the entry. Subjects that are many and short-lived
        share a window under a name of its own, `lane_of`."""
        if len(payload) > self.channel.max_payload:
            raise PayloadTooLarge(subject, len(payload), self.channel.max_payload)
        key = lane_of or subject
        lane = self._lanes.get(key) or self._lanes.setdefault(key, Lane(self))
        deadline = time.monotonic() + deadline_s
        if lane.turn.locked() or not lane.has_room(len(payload)):
            await self._wait_for_room(lane, subject, len(payload), deadline_s)
        entry = Entry(lane, subject, payload, headers, deadline)
        entry.reply = self.channel.expect(entry)
        lane.counter += 1
        number = lane.counter
        lane.entries[number] = entry
        lane.bytes += len(payload)
        entry.future.add_done_callback(lambda _: self._leave(lane, number, entry))
        if self.channel.connected and not lane.blocked:
            self._send(entry)
        self._arm_sweeper()
        return entry

    async def wait(self, entry: Entry) -> int:
        try:
            return await entry.future
        finally:
            entry.future.cancel()

    async def wait_all(self, entries: list[Entry]) -> list[int]:
        """Wait for all of them; only then raise the first failure."""
        results = await asyncio.gather(*(self.wait(entry) for entry in entries), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, int)]

    async def _wait_for_room(self, lane: Lane, subject: str, size: int, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s), lane.turn:
                while not lane.has_room(size):
                    lane.room.clear()
                    await lane.room.wait()
        except TimeoutError as error:
            if self.channel.waits:
                return await self._wait_for_room(lane, subject, size, deadline_s)
            oldest = next(iter(lane.entries.values()), None)
            raise PublishTimeout(subject, deadline_s, oldest.seen if oldest else "window full") from error

    def _leave(self, lane: Lane, number: int, entry: Entry) -> None:
        entry.state = DONE
        self.channel.forget(entry.reply)
        del lane.entries[number]
        lane.bytes -= len(entry.payload)
        if lane.half_empty():
            lane.room.set()

    def _send(self, entry: Entry) -> None:
        entry.state, entry.sent_at = SENT, time.monotonic()
        if not entry.lane.blocked:  # a probe under way does not unsay what blocks the lane
            entry.seen = NO_ANSWER
        entry.silent_since = entry.silent_since or entry.sent_at
        if not self.channel.send(entry.subject, entry.payload, entry.reply, entry.headers):
            entry.state, entry.seen = UNSENT, "the socket takes nothing more"
        else:
            entry.sends += 1

    # Answers

    def on_answer(self, entry: Entry, frame: Frame) -> None:
        if entry.future.done():
            return
        if status_of(frame) is not None:
            self._hold(entry, f"{status_of(frame)}: no stream takes this subject, or JetStream is still starting")
            return
        reply: dict[str, Any] = json.loads(frame.data)
        error = reply.get("error")
        if error is None:
            entry.duplicate = bool(reply.get("duplicate"))
            self.duplicates += entry.duplicate
            self._accept(entry, int(reply["seq"]))
            return
        text, code = str(error.get("description", "")), int(error.get("err_code", 0))
        if code == STORE_FAILED and "maximum" in text:
            self.refused_full += 1
            self._hold(entry, f"the stream is full: {text}")
        elif code == WRONG_LAST and ONCE.items() <= entry.headers.items() and (first := re.search(r"\d+$", text)):
            entry.duplicate = True
            self.duplicates += 1
            self._accept(entry, int(first[0]))
        elif code == STORE_FAILED:
            self._no_room(entry, StorageExhausted(redact(self.channel.url), entry.subject, text))
        elif isinstance(known := api_error(error, entry.subject, redact(self.channel.url)), StorageExhausted):
            self._no_room(entry, known)
        elif int(error.get("code", 0)) == 503:
            self._hold(entry, text)
        else:
            entry.fail(PublishRefused(entry.subject, text, code))

    def _no_room(self, entry: Entry, error: StorageExhausted) -> None:
        """The broker's disk is full or broken."""
        if not self.channel.patient:
            entry.fail(error)
            return
        self._tell_no_room(error)
        self._hold(entry, str(error))

    def _tell_no_room(self, error: StorageExhausted) -> None:
        if self.channel.stores:
            log.error("%s. Waiting until it stores again", error)
        self.channel.stores = False

    def _accept(self, entry: Entry, seq: int) -> None:
        lane = entry.lane
        self.channel.stores = True
        entry.future.set_result(seq)
        if not lane.blocked:
            return
        lane.probe_s = PROBE_S[0]
        lane.blocked_since = time.monotonic()
        entry.state = DONE
        nexts = lane.unsent(2)  # two for one: the window opens again as fast as room appears, not all at once
        if not nexts:
            lane.blocked = False
        elif lane.probe is None:
            self._send_all(nexts)

    def _hold(self, entry: Entry, seen: str) -> None:
        lane = entry.lane
        entry.state, entry.seen, entry.silent_since = UNSENT, seen, 0.0
        if not lane.blocked:
            lane.blocked, lane.blocked_since, lane.probe_s = True, time.monotonic(), PROBE_S[0]
        if lane.probe is None:
            lane.probe = asyncio.get_running_loop().call_later(lane.probe_s, self._probe, lane)
            lane.probe_s = min(lane.probe_s * 2, PROBE_S[1])

    def _probe(self, lane: Lane) -> None:
        lane.probe = None
        first = lane.unsent(1)
        if not first:
            lane.blocked = False
        elif self.channel.connected:
            if first[0].seen.startswith("503") and time.monotonic() - lane.blocked_since > MISSING_AFTER_S:
                lane.blocked_since = time.monotonic()
                self._spawn(self._check_stream(first[0]))
            self._send_all(first)

    async def _check_stream(self, entry: Entry) -> None:
        """Nobody takes the subject: fail if JetStream is up and knows no stream for it, go on waiting otherwise."""
        body = json.dumps({"subject": entry.subject}).encode()
        try:
            frame = await self.channel.request("$JS.API.STREAM.NAMES", body, 2.0)
        except TransportError as error:
            entry.seen = f"503, and {error}"
            return
        reply = json.loads(frame.data)
        if "error" not in reply and not reply.get("streams"):
            for waiting in list(entry.lane.entries.values()):
                waiting.fail(StreamMissing(entry.subject))

    # Sending again

    def _on_connect(self) -> None:
        for lane in self._lanes.values():
            lane.blocked = False
            again = list(lane.entries.values())
            for entry in again:
                self.resent += entry.state == SENT
                entry.state, entry.silent_since = UNSENT, 0.0
            if again:
                self._send_all(again)

    def _send_all(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.state == UNSENT and not entry.future.done():
                self._send(entry)

    def _arm_sweeper(self) -> None:
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        now, late = time.monotonic(), []
        pending = [entry for lane in self._lanes.values() for entry in lane.entries.values()]
        for entry in pending:
            if self.channel.waits:
                entry.deadline += SWEEP_S
            elif now >= entry.deadline:
                seen = entry.seen if self.channel.connected else "the broker is not connected"
                entry.fail(PublishTimeout(entry.subject, entry.deadline - entry.started, seen))
                continue
            if self.channel.connected and self._is_late(entry, now):
                late.append(entry)
        for lane in self._lanes.values():
            if lane.blocked and lane.probe is None and all(entry.state != SENT for entry in lane.entries.values()):
                self._probe(lane)
        if late:
            self._send_all(late)
        if any(entry.silent_since and now - entry.silent_since > MUTE_S for entry in late):
            self._spawn(self._check_mute())
        if pending:
            self._arm_sweeper()

    def _is_late(self, entry: Entry, now: float) -> bool:
        """To be sent again: its answer is overdue, or it could not be sent at first."""
        if entry.state == SENT and now - entry.sent_at > ACK_TIMEOUT_S:
            self.resent += 1
            entry.state, entry.seen = UNSENT, NO_ANSWER
        return entry.state == UNSENT and not entry.lane.blocked

    async def _check_mute(self) -> None:
        """nats-server goes on answering when its disk is full, only not to publishes. Whoever waits must hear of it."""
        try:
            await self.channel.request("$JS.API.INFO", b"", 2.0)
        except TransportError as error:
            log.warning("nothing is stored, and %s", error)
            return
        why = f"it answers, but has stored nothing for {MUTE_S:.0f} s: its disk is full or broken (see its log; restart it)"
        for lane in self._lanes.values():
            for entry in list(lane.entries.values()):
                if entry.silent_since and time.monotonic() - entry.silent_since > MUTE_S:
                    no_room = StorageExhausted(redact(self.channel.url), entry.subject, why)
                    if self.channel.patient:
                        self._tell_no_room(no_room)
                    else:
                        entry.fail(no_room)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        self._unlisten()
        for handle in (self._sweeper, *(lane.probe for lane in self._lanes.values())):
            if handle is not None:
                handle.cancel()
        for task in self._tasks:
            task.cancel()
        for lane in self._lanes.values():
            for entry in list(lane.entries.values()):
                entry.fail(ApiError(0, 0, "the transfer queue was closed before the message was stored", entry.subject))
