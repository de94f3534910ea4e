"""The TransferQueue: what services publish, pull, read and look up, over the streams of one run.

Guarantees: a published message is stored exactly once or the call raises; a pulled message is handed out until it is acked,
and an ack that returned is on the broker; a message that was delivered more often than allowed goes to the dead letters with a
reason and a `dropped` receipt instead of to the worker; a payload above the broker's limit travels as a blob, and neither side
notices. Nothing here blocks the event loop, and nothing spins while the broker is away. tests/shared/test_transfer_queue.py.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from shared import stream_admin, wire
from shared.blobs import Blobs
from shared.config import RunConfig
from shared.errors import ApiError, StreamMissing, TransportError
from shared.feed import NOT_FOUND
from shared.jetstream import Connection, JetStreamReply
from shared.letters import dropped, may_be_reported, too_often
from shared.log_reader import LogReader
from shared.publisher import ONCE, Entry, Publisher
from shared.pull import Delivery, Puller
from shared.records import BlobRef, DeadLetter
from shared.streams import MESSAGE_LIMIT, SPECS, consumer_config, stream_of
from shared.subjects import Subjects

log = logging.getLogger("slipstream.transport")

PUBLISH_DEADLINE_S = 600.0
"""How long a publish may wait for room in a full stream or for a broker that is away."""
ACK_WAIT_S = 30.0
PULL_BYTES = 16 << 20
BLOB_HEADER = "Slipstream-Blob"
"""Marks a message whose body is a BlobRef in place of the payload."""
BLOB_RETRY_S = 5.0
CONTROL_STREAMS = {"receipts", "weights", "metrics", "events"}
"""Never wait behind group payloads: they go over the other connection."""
API_DEADLINE_S = 30.0
NO_MESSAGE = 10037

Message = Any
"""A registered record, or bytes that are a message already."""


@dataclass(frozen=True, slots=True)
class StreamDepth:
    """How full a stream is. pending: not delivered yet; ack_pending: delivered, not acked (durable consumers only)."""

    messages: int
    bytes: int
    pending: int
    ack_pending: int


class Observer(Protocol):
    """Who wants to hear of messages that came again, and of those that were buried (shared/deliveries.py)."""

    def came_again(self, stage: str, group_id: str, delivered: int) -> None: ...

    async def buried(self, stage: str, group_id: str, delivered: int, why: str) -> None: ...


class TransferQueue:
    """One run's streams, over one connection."""

    def __init__(self, connection: Connection, subjects: Subjects) -> None:
        self.connection, self.subjects = connection, subjects
        self._bulk, self._control = Publisher(connection.bulk), Publisher(connection.control)
        self._pullers: list[Puller] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.blobs = Blobs(connection, self._bulk, subjects)
        self.emit_dropped = self.dead_lettered = self.blob_failures = 0
        self.observer: Observer | None = None
        """Hears of what had to be done twice."""

    async def ensure_streams(self, config: RunConfig) -> None:
        """Create the run's streams, or bring their limits up to `config`: `slipstream up`, and the controller. May be called
        twice at once."""
        await stream_admin.ensure(self.connection, self.subjects, config)

    async def wait_for_streams(self, deadline_s: float) -> None:
        """Until whoever owns the run has created them. Raises StreamMissing at the deadline."""
        await stream_admin.wait(self.connection, self.subjects, deadline_s)

    @property
    def publish_refusals(self) -> int:
        """How often a full stream refused a message that was then tried again."""
        return self._bulk.refused_full + self._control.refused_full

    # Publishing

    async def publish(
        self,
        subject: str,
        message: Message,
        msg_id: str | None = None,
        deadline_s: float = PUBLISH_DEADLINE_S,
        once: bool = False,
    ) -> int:
        """Store one message and return its sequence. A message with the same `msg_id` is stored once within the duplicate
        window, and the first one's sequence is returned; without an id each call stores one. `once`: at most one message of
        this subject is ever stored, as long as the log keeps it, and the first one's sequence is returned."""
        publisher, entry = await self._submit(subject, message, msg_id, deadline_s, once)
        return await publisher.wait(entry)

    async def submit(
        self, subject: str, message: Message, msg_id: str | None = None, deadline_s: float = PUBLISH_DEADLINE_S
    ) -> asyncio.Future[int]:
        """As `publish`, but returns once the message has a place in the window; await the result for its sequence, always."""
        _, entry = await self._submit(subject, message, msg_id, deadline_s)
        return entry.future

    async def publish_all(
        self, messages: Iterable[tuple[str, Message, str | None]], deadline_s: float = PUBLISH_DEADLINE_S
    ) -> list[int]:
        """Store many, as many at once as the window allows, sent in the order given. If some fail, all others are still
        tried, and then the first failure is raised."""
        waiting = []
        try:
            for subject, message, msg_id in messages:
                publisher, entry = await self._submit(subject, message, msg_id, deadline_s)
                waiting.append(publisher.wait(entry))
        finally:
            results = await asyncio.gather(*waiting, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, int)]

    async def _submit(
        self, subject: str, message: Message, msg_id: str | None, deadline_s: float, once: bool = False
    ) -> tuple[Publisher, Entry]:
        payload = message if isinstance(message, bytes) else wire.encode(message)
        stream = stream_of(self.subjects, subject)
        publisher = self._control if stream in CONTROL_STREAMS else self._bulk
        headers = {"Nats-Msg-Id": msg_id or uuid.uuid4().hex} | (ONCE if once else {})
        lane = stream if once else None  # such a subject has one message, and needs no window of its own
        if len(payload) <= MESSAGE_LIMIT:
            return publisher, await publisher.submit(subject, payload, headers, deadline_s, lane_of=lane)
        ref, stored_now = await self.blobs.put(stream, payload, deadline_s)
        headers[BLOB_HEADER] = "1"
        entry = await publisher.submit(subject, wire.encode(ref), headers, deadline_s, lane_of=lane)
        if stored_now:
            entry.future.add_done_callback(lambda _: self._drop_orphan(stream, ref, entry))
        return publisher, entry

    def _drop_orphan(self, stream: str, ref: BlobRef, entry: Entry) -> None:
        """A message that the broker knew already, whose blob was gone: it was consumed long ago, and so nobody refers to the
        blob that was just stored. If it was sent more than once, what the broker knew may be the first of these."""
        if entry.duplicate and entry.sends == 1 and SPECS[stream].retention == "workqueue":
            self._spawn(self._delete_blob(stream, ref))

    async def _delete_blob(self, stream: str, ref: BlobRef) -> None:
        try:
            await self.blobs.delete(stream, ref)
        except TransportError as error:
            log.warning("blob %s of %s stays behind: %s", ref.sha256, stream, error)

    def emit(self, subject: str, message: Message) -> None:
        """Send without an ack: for metrics, whose loss does not matter. Never waits and never raises on a lost connection;
        what could not be sent is counted in `emit_dropped`."""
        payload = message if isinstance(message, bytes) else wire.encode(message)
        channel = self.connection.control
        if len(payload) > channel.max_payload or not channel.send(subject, payload):
            self.emit_dropped += 1

    async def purge(self, stream: str, subject: str) -> None:
        """Remove every message of `subject`, which may hold wildcards, from a log."""
        await self.connection.api(f"STREAM.PURGE.{self.subjects.stream(stream)}", {"filter": subject}, API_DEADLINE_S)

    # Pulling

    async def pull(
        self,
        stream: str,
        durable: str,
        *,
        prefetch: int,
        filter_subject: str | None = None,
        recreate: bool = False,
        ack_wait_s: float = ACK_WAIT_S,
        max_bytes: int = PULL_BYTES,
        max_deliveries: int | None = None,
        stage: str | None = None,
    ) -> Puller:
        """Take part in the work of the durable consumer `durable` of `stream` (one of subjects.STREAMS), created if absent.

        `recreate` makes a new one in place of every earlier one of that name: all un-acked messages are delivered anew at
        once, and an old process's pulls and acks no longer count. With `max_deliveries`, a message that comes more often goes
        to `<run>.dead.<stage>` (`stage` is `durable` by default).
        """
        full = self.subjects.stream(stream)
        name = await self._ensure_consumer(
            full, durable, filter_subject or self.subjects.wildcard(stream), ack_wait_s, recreate
        )
        puller = Puller(
            self.connection,
            full,
            name,
            prefetch=prefetch,
            max_bytes=max_bytes,
            ack_wait_s=ack_wait_s,
            workqueue=SPECS[stream].retention == "workqueue",
            receive=lambda delivery: self._receive(delivery, stream, max_deliveries, stage or durable),
            acked=lambda delivery: self._after_ack(delivery, stream),
        )
        self._pullers.append(puller)
        return await puller.start()

    async def _ensure_consumer(self, stream: str, durable: str, subject: str, ack_wait_s: float, recreate: bool) -> str:
        name = durable
        if recreate:
            for old in await self._consumers(stream):
                if old["name"] == durable or old["name"].startswith(f"{durable}-"):
                    # Gone already is what is wanted; if it is not gone, the create below says so.
                    with contextlib.suppress(ApiError):
                        await self.connection.api(f"CONSUMER.DELETE.{stream}.{old['name']}", deadline_s=API_DEADLINE_S)
            name = f"{durable}-{uuid.uuid4().hex[:12]}"
        config = consumer_config(name, subject, ack_wait_s)
        body = {"stream_name": stream, "config": config}
        try:
            await self.connection.api(f"CONSUMER.CREATE.{stream}.{name}.{subject}", body, API_DEADLINE_S)
        except ApiError as error:
            if error.err_code in NOT_FOUND:
                raise StreamMissing(stream) from error
            raise
        return name

    async def _consumers(self, stream: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        while True:
            try:
                reply = await self.connection.api(f"CONSUMER.LIST.{stream}", {"offset": len(found)}, API_DEADLINE_S)
            except ApiError as error:
                if error.err_code in NOT_FOUND:
                    raise StreamMissing(stream) from error
                raise
            found += reply.get("consumers") or []
            if len(found) >= reply["total"] or not reply.get("consumers"):
                return found

    def _receive(self, delivery: Delivery, stream: str, most: int | None, stage: str) -> Awaitable[bool] | None:
        """What a message needs before it may be handed out: None, or work that says whether to."""
        if delivery.delivered > 1 and self.observer is not None:
            self.observer.came_again(stage, delivery.msg_id, delivery.delivered)
        if not delivery.subject.startswith(f"{self.subjects.run}.{stream}"):
            return self.bury(delivery, stage, f"it was published to {delivery.subject!r} and brought here")
        if BLOB_HEADER in delivery.headers:
            return self._fetch(delivery, stream, most, stage)
        if most is not None and delivery.delivered > most:
            return self.bury(delivery, stage, too_often(delivery, most))
        return None

    async def _fetch(self, delivery: Delivery, stream: str, most: int | None, stage: str) -> bool:
        """Put the payload in the place of its reference. A blob that cannot be read is tried again with the next delivery."""
        why = ""
        try:
            delivery.blob = wire.decode(delivery.data, BlobRef)
            delivery.data = await self.blobs.get(stream, delivery.blob)
        except (TransportError, wire.WireError) as error:
            self.blob_failures += 1
            why = f"; {error}"
            log.error("%s: message %s (delivery %d): %s", stream, delivery.msg_id, delivery.delivered, error)
        if most is not None and delivery.delivered > most:
            return await self.bury(delivery, stage, too_often(delivery, most) + why)
        if why:
            await delivery.nak(BLOB_RETRY_S)
        return not why

    async def _after_ack(self, delivery: Delivery, stream: str) -> None:
        if delivery.blob is not None and SPECS[stream].retention == "workqueue":
            await self._delete_blob(stream, delivery.blob)

    async def bury(self, delivery: Delivery, stage: str, reason: str) -> bool:
        """Copy to the dead letters, drop the group in the ledger, then ack. Each step may be repeated: the ids are fixed."""
        try:
            payload, now, group_id = delivery.data, time.time(), delivery.msg_id
            letter = DeadLetter(stage, group_id, reason, payload, delivery.delivered, now)
            await self.publish(self.subjects.dead(stage), letter, f"{stage}:{delivery.seq}:{group_id}")
            receipt = dropped(group_id, payload, stage, reason, now)
            await self.publish(self.subjects.reported, receipt, f"dead:{stage}:{group_id}")
            if self.observer is not None:
                await self.observer.buried(stage, group_id, delivery.delivered, reason)
            await delivery.ack()
            self.dead_lettered += 1
            log.error("%s: %s went to the dead letters: %s", stage, group_id, reason)
        except TransportError as error:
            log.error("%s: %s could not be moved to the dead letters: %s", stage, delivery.msg_id, error)
            delivery.release()
        return False

    # Reading

    async def read(
        self, stream: str, start_seq: int = 1, subject: str | None = None, live: bool = False
    ) -> AsyncIterator[tuple[bytes, int]]:
        """(message, sequence) of a log from `start_seq` on, in order, without gaps or repeats, also over restarts of the
        broker. Ends at what was the last message at the time of the call, or, with `live`, never. Raises BlobMissing for a
        message whose payload has left the archive; go on behind it. What its writer had no right to comes as wire.UNFIT."""
        reader = LogReader(
            self.connection,
            self.subjects.stream(stream),
            start_seq=start_seq,
            subject=subject,
            live=live,
            deadline_s=API_DEADLINE_S,
        )
        async with contextlib.aclosing(reader.messages()) as messages:
            async for frame, seq in messages:
                data = await self._whole(stream, frame.data, BLOB_HEADER in (frame.headers or {}))
                yield data if self._is_fit(stream, frame.subject, data, seq) else wire.UNFIT, seq

    def _is_fit(self, stream: str, subject: str, data: bytes, seq: int) -> bool:
        """Whether its writer had the right to put it there. Whoever may read a log can have the broker carry its messages over
        into another stream, but they keep the subject that they were published to."""
        if not subject.startswith(f"{self.subjects.run}.{stream}"):
            log.error("%s: message %d was published to %r and brought here: ignored", stream, seq, subject)
            return False
        return subject != self.subjects.reported or may_be_reported(data, seq)

    async def _whole(self, stream: str, data: bytes, is_blob: bool) -> bytes:
        return await self.blobs.get(stream, wire.decode(data, BlobRef)) if is_blob else data

    async def last_seq(self, stream: str) -> int:
        """The sequence of the newest message of a stream, 0 if it never had one."""
        return int((await self._state(stream))["last_seq"])

    async def last(self, subject: str) -> tuple[bytes, int] | None:
        """The newest message of a subject and its sequence."""
        name = stream_of(self.subjects, subject)
        verb = f"STREAM.MSG.GET.{self.subjects.stream(name)}"
        try:
            reply = await self.connection.api(verb, {"last_by_subj": subject})
        except ApiError as error:
            if error.err_code == NO_MESSAGE:
                return None
            if error.err_code in NOT_FOUND:
                raise StreamMissing(subject) from error
            raise
        message = reply["message"]
        is_blob = BLOB_HEADER.encode() in base64.b64decode(message.get("hdrs", ""))
        data = base64.b64decode(message.get("data", ""))
        return await self._whole(name, data, is_blob), int(message["seq"])

    async def depths(self) -> dict[str, StreamDepth]:
        """How full each stream of the run is."""
        names = list(SPECS)
        return dict(zip(names, await asyncio.gather(*(self._depth(name) for name in names)), strict=True))

    async def _state(self, name: str) -> JetStreamReply:
        stream = self.subjects.stream(name)
        try:
            return (await self.connection.api(f"STREAM.INFO.{stream}"))["state"]
        except ApiError as error:
            if error.err_code in NOT_FOUND:
                raise StreamMissing(stream) from error
            raise

    async def _depth(self, name: str) -> StreamDepth:
        state = await self._state(name)
        durable = [c for c in await self._consumers(self.subjects.stream(name)) if c["config"].get("durable_name")]
        return StreamDepth(
            int(state["messages"]),
            int(state["bytes"]),
            sum(int(consumer["num_pending"]) for consumer in durable),
            sum(int(consumer["num_ack_pending"]) for consumer in durable),
        )

    async def close(self) -> None:
        """Stop the pullers (what was not handed out goes back) and the publishers. The connection stays open."""
        for puller in self._pullers:
            await puller.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)
        self._bulk.close()
        self._control.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
