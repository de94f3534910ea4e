"""Reading a log: every message of a stream once, in order, across restarts of the broker.

Uses an ephemeral pull consumer without acks and counts its deliveries: a gap in the consumer's own sequence, a new connection
or a lost consumer makes a new one that starts behind the last message seen. Any number of readers may read one log, and none
leaves a trace in it. A live reader of a service waits for a broker that does not answer, however long that takes.
tests/shared/test_log_reader.py holds "no gap, no duplicate" over SIGKILL of the broker, test_cluster.py over that of a node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

from shared.errors import ApiError, ConsumerGone, RequestTimeout, StreamMissing, TransportError
from shared.feed import NOT_FOUND, Drained, Feed, position
from shared.jetstream import Connection, JetStreamReply
from shared.link import Frame

log = logging.getLogger("slipstream.transport")

READ_AHEAD = 256
READ_AHEAD_BYTES = 8 << 20
FORGOTTEN_AFTER_S = 60.0
"""The broker removes the consumer of a reader that has vanished for so long."""
CREATE_S = 5.0
"""So long a consumer may take to be made; then it is given up for one of another name. A cluster may have chosen a node that died
just now, and then keeps to it."""


class LogReader:
    """One pass over a stream. Iterate it; it yields (message, sequence)."""

    def __init__(
        self, connection: Connection, stream: str, *, start_seq: int, subject: str | None, live: bool, deadline_s: float
    ) -> None:
        self._connection, self._stream, self._subject = connection, stream, subject
        self._live, self._deadline_s = live, deadline_s
        self._next_seq = max(1, start_seq)
        self._last_seq: int | None = None
        self._consumer_seq = self._consumer_pending = 0
        self._queue: deque[tuple[Frame, int]] = deque()
        self._arrived = asyncio.Event()
        self._feed: Feed | None = None
        self._stale: Exception | None = None
        self.restarts = 0

    async def messages(self) -> AsyncGenerator[tuple[Frame, int], None]:
        unlisten = self._connection.bulk.on_connect(self._interrupt)
        try:
            if not self._live:
                self._last_seq = await self._tail()
                if self._next_seq > self._last_seq:
                    return
            await self._restart()
            while True:
                while self._queue:
                    frame, seq = self._queue.popleft()
                    yield frame, seq
                    if self._last_seq is not None and seq >= self._last_seq:
                        return
                if not self._live and self._consumer_pending == 0:
                    return
                if self._feed is not None:
                    self._feed.pump()
                if not await self._wait():
                    return
        finally:
            unlisten()
            await self._stop()

    async def _wait(self) -> bool:
        """Until something is in the queue. False: a reader that is not live has seen everything."""
        if self._stale is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._queue or self._stale is None:
            return True
        error, self._stale = self._stale, None
        if isinstance(error, Drained):
            return False
        if not isinstance(error, ConsumerGone):
            raise error
        await self._restart()
        return True

    async def _tail(self) -> int:
        try:
            info = await self._connection.api(f"STREAM.INFO.{self._stream}", deadline_s=self._deadline_s)
        except ApiError as error:
            if error.err_code in NOT_FOUND:
                raise StreamMissing(self._stream) from error
            raise
        return int(info["state"]["last_seq"])

    async def _restart(self) -> None:
        """A new consumer that starts behind the last message seen."""
        await self._stop()
        self.restarts += 1
        patient = self._live and self._connection.bulk.patient
        deadline = time.monotonic() + self._deadline_s
        while True:
            name = f"reader-{uuid.uuid4().hex[:16]}"
            try:
                info = await self._create(name)
                break
            except RequestTimeout as error:
                if time.monotonic() > deadline and not patient:
                    raise
                log.warning("%s; trying another", error)
        self._consumer_seq, self._consumer_pending = 0, int(info.get("num_pending", 0))
        self._stale = None if self._live or self._consumer_pending else Drained()
        self._feed = Feed(
            self._connection,
            self._stream,
            name,
            capacity=lambda: READ_AHEAD,
            used=lambda: len(self._queue),
            on_message=self._on_message,
            on_gone=self._mark_stale,
            max_bytes=READ_AHEAD_BYTES,
            drain=not self._live,
            replaceable=True,
        )
        self._feed.start()

    async def _create(self, name: str) -> JetStreamReply:
        config: dict[str, Any] = {
            "name": name,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._next_seq,
            "ack_policy": "none",
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(FORGOTTEN_AFTER_S * 1e9),
        }
        verb = f"CONSUMER.CREATE.{self._stream}.{name}"
        if self._subject is not None:
            config["filter_subject"] = self._subject
            verb += f".{self._subject}"
        try:
            return await self._connection.api(verb, {"stream_name": self._stream, "config": config}, CREATE_S)
        except ApiError as error:
            if error.err_code in NOT_FOUND:
                raise StreamMissing(self._stream) from error
            raise

    async def _stop(self) -> None:
        if self._feed is None:
            return
        feed, self._feed = self._feed, None
        feed.stop()
        if self._connection.control.connected:
            with contextlib.suppress(TransportError):  # it removes itself when forgotten
                await self._connection.api(f"CONSUMER.DELETE.{self._stream}.{feed.consumer}", deadline_s=2)

    def _on_message(self, frame: Frame) -> None:
        at = position(frame.reply)
        if self._stale is not None or at.consumer_seq <= self._consumer_seq:
            return
        if at.consumer_seq != self._consumer_seq + 1:
            self._interrupt()
            return
        self._consumer_seq, self._consumer_pending = at.consumer_seq, at.pending
        self._next_seq = at.seq + 1
        self._queue.append((frame, at.seq))
        self._arrived.set()

    def _interrupt(self) -> None:
        self._mark_stale(ConsumerGone(self._stream, self._feed.consumer if self._feed else ""))

    def _mark_stale(self, error: Exception) -> None:
        self._stale = error
        self._arrived.set()
