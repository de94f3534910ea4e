"""The pull side: a durable consumer's messages, held by this process from their receipt until they are acked or given back.

`Puller` takes what a `Feed` (shared/feed.py) brings and holds each message, with `in_progress` heartbeats, until it is acked,
given back or released.

Guarantees: a message that the broker delivers again while this process still holds it, or after its ack returned here, is not
handed out twice; an ack is confirmed by the broker or raises; a consumer that was deleted raises `ConsumerGone`.
tests/shared/test_pull.py holds all of this over SIGKILL of the broker.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from shared.errors import AckTimeout, ApiError, ConsumerGone, RequestTimeout
from shared.feed import LINGER_S, NOT_FOUND, Feed, Position, position
from shared.jetstream import Connection
from shared.link import Frame
from shared.records import BlobRef

ACK_DEADLINE_S = 60.0
ACK_ATTEMPT_S = 1.0
NO_SUCH_MESSAGE = {10037, 10043, 10057}
"""JetStream's codes for a message that is not in the stream (any more)."""
GIVEN_BACK_S = LINGER_S + 0.5
"""What is given back comes again only when the broker has forgotten the requests of who gave it back: it would come to these, be
given back, and so on, and count as delivered each time, until it is buried for it."""
REMEMBERED_ACKS = 16_384
"""A killed broker may forget an ack that it has confirmed, or have the next delivery on its way; so many are known here."""


class Delivery:
    """A message in this process's hands."""

    __slots__ = ("_epoch", "_puller", "_reply", "blob", "data", "delivered", "headers", "msg_id", "seq", "subject")

    def __init__(self, puller: Puller, frame: Frame, at: Position) -> None:
        self._puller, self._reply, self._epoch = puller, frame.reply, puller.epoch
        self.data: bytes = frame.data
        self.subject: str = frame.subject
        self.headers: dict[str, str] = frame.headers or {}
        self.msg_id: str = self.headers.get("Nats-Msg-Id", "")
        self.seq, self.delivered = at.seq, at.delivered
        self.blob: BlobRef | None = None
        """Where `data` came from, if it was too large for a message."""

    @property
    def held(self) -> bool:
        """The broker is being told that work on it goes on."""
        return self._puller.holds(self)

    async def ack(self, deadline_s: float = ACK_DEADLINE_S) -> None:
        """Done. Returns once the broker has confirmed it; raises AckTimeout or ConsumerGone."""
        await self._puller.ack(self, deadline_s)

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back, to be delivered again after `delay_s`."""
        self._puller.nak(self, delay_s)

    def release(self) -> None:
        """Stop the heartbeats: the broker delivers it again once the ack wait has run out."""
        self._puller.forget(self)


class Puller:
    """The work of one durable consumer. `await next(timeout_s)`, then `await delivery.ack()`.

    `receive` may take a message aside before it is handed out: it returns None for "hand it out", or something to await that
    says whether to.
    `prefetch` messages may lie ready beside those that were handed out; with 0 the broker is asked only while someone waits
    in `next`, so that a busy replica hoards nothing.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        consumer: str,
        *,
        prefetch: int,
        max_bytes: int,
        ack_wait_s: float,
        workqueue: bool,
        receive: Callable[[Delivery], Awaitable[bool] | None] | None = None,
        acked: Callable[[Delivery], Awaitable[None]] | None = None,
    ) -> None:
        self.connection, self.stream, self.consumer = connection, stream, consumer
        self._channel = (
            connection.bulk
        )  # acks too: their answers come with the next messages, which saves waking up for them
        self.prefetch = prefetch
        self._ack_wait_s = ack_wait_s
        self._workqueue = workqueue
        self._receive, self._acked = receive, acked
        self._ready: deque[Delivery] = deque()
        self._held: dict[int, Delivery] = {}
        self._acked_ids: dict[int, str] = {}
        """Message ids by stream sequence, the newest last."""
        self._waiting: deque[asyncio.Future[bool]] = deque()
        self._woken = 0
        self._error: Exception | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._taking = 0
        self._stopping = False
        self.redelivered = 0
        self._feed = Feed(
            connection,
            stream,
            consumer,
            capacity=self._capacity,
            used=lambda: len(self._ready) + self._taking,
            on_message=self._on_message,
            on_gone=self._on_gone,
            max_bytes=max_bytes,
        )

    async def start(self) -> Puller:
        self._feed.start()
        self._beat = asyncio.create_task(self._heartbeats())
        return self

    async def next(self, timeout_s: float) -> Delivery | None:
        """The next message, or None: always, once `stopped`. Raises what ended the consumer (ConsumerGone, AccessDenied)."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._stopping:
                await asyncio.sleep(0)  # to who asks again and again, lest nobody else has a turn
                return None
            if not await self._wait(deadline):
                return None
        delivery = self._ready.popleft()
        self._feed.pump()
        return delivery

    async def _wait(self, deadline: float) -> bool:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        self._waiting.append(turn)
        timer = loop.call_at(deadline, _finish, turn)
        self._feed.pump()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                loop.call_soon(self._wake)  # the message that it was woken for is another's now
            raise
        finally:
            timer.cancel()
            if turn in self._waiting:
                self._waiting.remove(turn)
            if turn.done() and not turn.cancelled() and turn.result():
                self._woken -= 1
        return loop.time() < deadline or bool(self._ready) or self._error is not None

    async def set_prefetch(self, prefetch: int) -> None:
        """Change how many lie ready. What is ready beyond that goes back to the broker, and to others a moment later."""
        shrinks, self.prefetch = prefetch < self.prefetch, prefetch
        if shrinks:
            self._feed.reset()
            self._give_back(self._capacity())
        self._feed.pump()

    async def stop(self) -> None:
        """Give back what was not handed out and end the heartbeats. What is held can still be acked."""
        self._stopping = True
        self._feed.stop()
        self._beat.cancel()
        for task in list(self._tasks):
            task.cancel()
        self._give_back(0)
        while self._waiting:
            _finish(self._waiting.popleft())

    @property
    def stopped(self) -> bool:
        return self._stopping

    @property
    def epoch(self) -> int:
        """Grows with each new connection."""
        return self.connection.bulk.connections

    @property
    def ready(self) -> int:
        return len(self._ready)

    def holds(self, delivery: Delivery) -> bool:
        return self._held.get(delivery.seq) is delivery and not self._stopping

    def forget(self, delivery: Delivery) -> None:
        if self._held.get(delivery.seq) is delivery:
            del self._held[delivery.seq]

    async def ack(self, delivery: Delivery, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        seen = "not connected"
        while (left := deadline - time.monotonic()) > 0:
            if self.connection.bulk.waits:
                waited = time.monotonic()
                await self.connection.bulk.wait_connected(left)
                deadline += time.monotonic() - waited
                continue
            if not await self.connection.bulk.wait_connected(left):
                continue
            try:
                if delivery._epoch != self.epoch and await self._forgotten(delivery, left):
                    break
                # An ack of a redelivered message must carry the newest reply subject, so it is read anew on each try.
                await self._channel.request(delivery._reply, b"+ACK", min(left, ACK_ATTEMPT_S), once=True)
                break
            except RequestTimeout as error:
                seen = str(error)
                delivery._epoch = -1  # in doubt from now on
        else:
            raise AckTimeout(delivery.subject, delivery.seq, deadline_s, seen)
        self.forget(delivery)
        self._remember(delivery)
        if self._acked is not None:
            await self._acked(delivery)

    def _remember(self, delivery: Delivery) -> None:
        self._acked_ids[delivery.seq] = delivery.msg_id
        if len(self._acked_ids) > REMEMBERED_ACKS:
            del self._acked_ids[next(iter(self._acked_ids))]

    async def _forgotten(self, delivery: Delivery, deadline_s: float) -> bool:
        """A killed broker may have forgotten its last deliveries, and does not answer the ack of a message that it does not
        remember to have delivered. In a work queue the message is then taken out directly, which is all that an ack does
        there; a log keeps it anyway, and may deliver it again."""
        deadline_s = min(deadline_s, 5.0)
        try:
            info = await self.connection.api(f"CONSUMER.INFO.{self.stream}.{self.consumer}", deadline_s=deadline_s)
            if int(info["delivered"]["stream_seq"]) >= delivery.seq:
                return False
            if self._workqueue:
                body = {"seq": delivery.seq, "no_erase": True}
                await self.connection.api(f"STREAM.MSG.DELETE.{self.stream}", body, deadline_s)
        except ApiError as error:
            if error.err_code in NOT_FOUND:
                raise ConsumerGone(self.stream, self.consumer) from error
            if error.err_code not in NO_SUCH_MESSAGE:
                raise
        return True

    def nak(self, delivery: Delivery, delay_s: float) -> None:
        self.forget(delivery)
        payload = b"-NAK" if delay_s <= 0 else b"-NAK " + json.dumps({"delay": int(delay_s * 1e9)}).encode()
        self.connection.control.send(delivery._reply, payload)  # if it is not sent, the ack wait gives it back

    def _capacity(self) -> int:
        """Who was woken for a message that lies ready still counts: its task has not run yet, and the broker was asked for
        as many. Otherwise a burst would be given back, and count as deliveries that nobody saw."""
        return 0 if self._error is not None else max(self.prefetch, len(self._waiting) + self._woken)

    def _on_message(self, frame: Frame) -> None:
        at = position(frame.reply)
        held = self._held.get(at.seq)
        if held is not None:
            held._reply, held._epoch, held.delivered = frame.reply, self.epoch, at.delivered
            self.redelivered += 1
            self._feed.pump()
            return
        self.redelivered += at.delivered > 1
        delivery = Delivery(self, frame, at)
        if self._acked_ids.get(at.seq) == delivery.msg_id:
            self.connection.control.send(
                frame.reply, b"+ACK"
            )  # if it is not sent, the next delivery is answered the same way
            self._feed.pump()
            return
        if self._stopping or len(self._ready) >= max(self._capacity(), 1):
            self.nak(delivery, GIVEN_BACK_S)
            return
        self._held[at.seq] = delivery
        work = self._receive(delivery) if self._receive is not None else None
        if work is None:
            self._offer(delivery)
        else:
            self._taking += 1
            self._spawn(self._take_in(work, delivery))

    async def _take_in(self, work: Awaitable[bool], delivery: Delivery) -> None:
        try:
            wanted = await work
        finally:
            self._taking -= 1
        if wanted and not self._stopping:
            self._offer(delivery)

    def _offer(self, delivery: Delivery) -> None:
        self._ready.append(delivery)
        self._wake()

    def _wake(self) -> None:
        if self._ready and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(True)
                self._woken += 1

    def _on_gone(self, error: Exception) -> None:
        self._error = error
        while self._waiting:
            _finish(self._waiting.popleft())

    def _give_back(self, keep: int) -> None:
        while len(self._ready) > keep:
            self.nak(self._ready.pop(), GIVEN_BACK_S)

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._ack_wait_s / 3)
            for (
                delivery
            ) in self._held.values():  # one that is not sent does no harm: the next comes before the ack wait
                self.connection.control.send(delivery._reply, b"+WPI")

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _finish(future: asyncio.Future[bool]) -> None:
    """Wake without a message."""
    if not future.done():
        future.set_result(False)
