"""The requests of one pull consumer: as many messages are asked for as there is room for, and each is handed to `on_message`.

Guarantees: never more is asked for than there is room for; a lost connection, a restarted broker or a silent pull request is
noticed (by the reconnect, or by missing idle heartbeats) and asked anew; a consumer that was deleted is told to `on_gone` instead
of falling silent. tests/shared/test_pull.py holds this over SIGKILL of the broker. What becomes of a message is not
known here: see shared/pull.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.channel import status_of
from shared.errors import AccessDenied, ApiError, ConsumerGone, RequestTimeout, TransportError
from shared.jetstream import Connection
from shared.link import Frame

log = logging.getLogger("slipstream.transport")

EXPIRES_S = 30.0
IDLE_HEARTBEAT_S = 5.0
SILENCE_S = 2.5 * IDLE_HEARTBEAT_S
"""A pull request that has shown neither message nor heartbeat for so long is dead."""
RETRY_S = 0.25
LINGER_S = 1.0
"""An abandoned inbox is listened to for so long, so that what was on its way is not lost until its ack wait runs out."""
NOT_FOUND = {10014, 10059}
"""JetStream's codes for a consumer and a stream that do not exist."""
CHECK_S = 5.0
"""So long the broker may take to say whether the consumer is there."""


@dataclass(slots=True, frozen=True)
class Position:
    """What the reply subject of a delivered message says about it."""

    delivered: int
    seq: int
    consumer_seq: int
    pending: int


def position(reply: str) -> Position:
    """Parse `$JS.ACK.<stream>.<consumer>.<delivered>.<seq>.<consumer seq>.<time>.<pending>`; a newer form has two tokens
    before the stream and one behind."""
    tokens = reply.split(".")
    at = 4 if len(tokens) == 9 else 6
    if len(tokens) < 9 or tokens[0] != "$JS" or tokens[1] != "ACK":
        raise ValueError(f"not the reply subject of a JetStream message: {reply!r}")
    return Position(int(tokens[at]), int(tokens[at + 1]), int(tokens[at + 2]), int(tokens[at + 4]))


class Drained(Exception):
    """Nothing is left for a feed that was asked to end there."""


class Feed:
    """Keeps pull requests open at one consumer, for at most `capacity()` messages less the `used()` that are here already."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        consumer: str,
        *,
        capacity: Callable[[], int],
        used: Callable[[], int],
        on_message: Callable[[Frame], None],
        on_gone: Callable[[Exception], None],
        max_bytes: int,
        drain: bool = False,
        replaceable: bool = False,
    ) -> None:
        """`replaceable`: whoever hears `on_gone` makes another consumer. So one that cannot be asked is given up at once: where
        one node of a cluster keeps it, it is away for as long as that node."""
        self.connection, self.stream, self.consumer = connection, stream, consumer
        self._channel = connection.bulk
        self._capacity, self._used = capacity, used
        self._on_message, self._on_gone = on_message, on_gone
        self._max_bytes, self._drain = max_bytes, drain
        self._replaceable = replaceable
        self._checking = False
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._sid = 0
        self._inbox = ""
        self._session = 0
        self._outstanding = 0
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self.resets = 0

    def start(self) -> None:
        self._unlisten = self._channel.on_connect(self._open_inbox)
        self._channel.on_denied(self._on_denied)
        if self._channel.connected:
            self._open_inbox()
        self._watch()

    def stop(self) -> None:
        """Ask for nothing more."""
        if self._stopped:
            return
        self._stopped = True
        self._unlisten()
        self._channel.off_denied(self._on_denied)
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        self._channel.unsubscribe(self._sid)

    def pump(self) -> None:
        """Ask for what there is room for, once that is at least half of what there could be."""
        if self._stopped or not self._channel.connected or not self._sid:
            return
        capacity = self._capacity()
        missing = capacity - self._used() - self._outstanding
        if missing > 0 and missing * 2 >= capacity:
            request: dict[str, Any] = {"batch": missing, "max_bytes": self._max_bytes}
            if self._drain:
                request["no_wait"] = True
            else:
                request |= {"expires": int(EXPIRES_S * 1e9), "idle_heartbeat": int(IDLE_HEARTBEAT_S * 1e9)}
            if self._channel.send(self._next, json.dumps(request).encode(), self._inbox):
                self._outstanding += missing
                self._heard = time.monotonic()

    def reset(self) -> None:
        """Abandon all requests and start over with a new inbox, so that a late answer to an old one cannot be miscounted."""
        old, connection = self._sid, self._channel.connections
        self.resets += 1
        self._open_inbox()

        def forget_old() -> None:
            if connection == self._channel.connections:  # a newer connection knows nothing of it
                self._channel.unsubscribe(old)

        asyncio.get_running_loop().call_later(LINGER_S, forget_old)

    def _open_inbox(self) -> None:
        self._session += 1
        session = self._session
        self._inbox, self._sid = self._channel.subscribe(lambda frame: self._receive(frame, session))
        self._outstanding, self._heard = 0, time.monotonic()
        self.pump()

    def _receive(self, frame: Frame, session: int) -> None:
        current = session == self._session
        if current:
            self._heard = time.monotonic()
        status = status_of(frame) if not frame.data else None
        if status is None:
            if current:
                self._outstanding = max(0, self._outstanding - 1)
            self._on_message(frame)
        elif current:
            self._on_status(status, frame.headers or {})

    def _on_status(self, status: str, headers: dict[str, str]) -> None:
        text = headers.get("Description", "")
        if status == "100":
            return
        if status == "503" or (status == "409" and ("Deleted" in text or "Not Found" in text)):
            self._outstanding = 0
            if not self._checking:
                self._checking = True
                self._spawn(self._check_consumer())
            return
        left = headers.get("Nats-Pending-Messages")
        self._outstanding = max(0, self._outstanding - int(left)) if left is not None else 0
        if status in ("404", "408", "409") and "Exceeded" not in text and "push" not in text.lower():
            if self._drain and status == "404":
                self._on_gone(Drained())
            elif not self._stopped:
                asyncio.get_running_loop().call_later(0.01, self.pump)
            return
        self._on_gone(ApiError(int(status), 0, text, self._next))

    async def _check_consumer(self) -> None:
        """Nobody answers the pull: the consumer is gone, or JetStream is still starting."""
        doubt: TransportError | None = None
        try:
            await self.connection.api(f"CONSUMER.INFO.{self.stream}.{self.consumer}", deadline_s=CHECK_S)
        except (ApiError, RequestTimeout) as error:
            log.warning("%s", error)
            doubt = error
        except TransportError as error:
            self._on_gone(error)
            return
        await asyncio.sleep(RETRY_S)
        if doubt is not None and (self._replaceable or (isinstance(doubt, ApiError) and doubt.err_code in NOT_FOUND)):
            self._on_gone(ConsumerGone(self.stream, self.consumer))
            return
        self._checking = False
        self.pump()

    def _on_denied(self, action: str, subject: str) -> None:
        if subject in (self._next.lower(), self._inbox.lower()):
            self._on_gone(AccessDenied(self.connection.url, action, self._next if action == "publish" else self._inbox))

    def _watch(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(1.0, self._watch)
        if not self._channel.connected:
            return
        if self._outstanding and time.monotonic() - self._heard > SILENCE_S:
            log.warning("%s/%s: the pull request went silent; asking again", self.stream, self.consumer)
            self.reset()
        else:
            self.pump()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
