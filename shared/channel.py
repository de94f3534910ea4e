"""One client connection to the broker: what it takes to keep one, and who waits for which answer on it.

Owns: the socket that comes back by itself, and the mapping of replies to whoever waits for them.

Guarantees: a request ends within its deadline, in an answer or in an error that names the broker's address or the subject and
what to do. A refused permission is `AccessDenied`, not a time-out. Lost connections come back by themselves, for ever; listeners
hear of each new connection. tests/shared/test_jetstream.py holds this against a real broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.errors import Error as NatsError

from shared.errors import AccessDenied, BrokerRefuses, BrokerUnavailable, RequestTimeout
from shared.link import Frame, Link, NotSecret

log = logging.getLogger("slipstream.transport")

ATTEMPT_S = 3.0
"""One try of a request; then it is sent again, as long as its deadline allows."""
RETRY_S = 0.1
WRITE_BACKLOG_BYTES = 64 << 20
"""What may wait for the socket before `send` refuses. Publish windows stay far below it."""
DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"')


class Waiter(Protocol):
    """Someone who waits for the answer to a message sent to `subject`."""

    subject: str

    def answer(self, frame: Frame) -> None: ...

    def fail(self, error: Exception) -> None: ...


class Lost(Exception):
    """The connection went away while an answer was waited for."""


class Request:
    """A waiter for one answer."""

    __slots__ = ("future", "subject")

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()

    def answer(self, frame: Frame) -> None:
        if not self.future.done():
            self.future.set_result(frame)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    async def within(self, timeout_s: float) -> Frame:
        """The answer. Not wait_for: it costs more, and before Python 3.12 swallows a cancellation that meets the answer."""
        timer = asyncio.get_running_loop().call_later(timeout_s, self.fail, TimeoutError())
        try:
            return await self.future
        finally:
            timer.cancel()


def status_of(frame: Frame) -> str | None:
    """The status code of a message that the server made up itself (503: nobody listens there), None for others."""
    return frame.headers.get("Status") if frame.headers else None


def redact(url: str) -> str:
    """`url` without its password: it goes into error texts and logs."""
    parts = urlsplit(url)
    return url.replace(f":{parts.password}@", ":***@") if parts.password else url


class Channel:
    """One client connection that outlives its sockets."""

    def __init__(self, url: str, name: str, options: Mapping[str, Any]) -> None:
        self.url, self.name = url, name
        self._options = options
        self._waiters: dict[str, Waiter] = {}
        self._tokens = 0
        self._listeners: list[Callable[[], None]] = []
        self._denied: list[Callable[[str, str], None]] = []
        self._up = asyncio.Event()
        self._closing = False
        self._reopening: asyncio.Task[None] | None = None
        self._last_error = "no answer"
        self._refused: asyncio.Future[str] | None = None
        self._inbox = ""
        self._deaf: AccessDenied | None = None
        """Set when this user may not listen for answers at all."""
        self.patient = False
        """Deadlines of publishes and acks do not run while the broker is away or cannot store: a service outlives that."""
        self.stores = True
        """False from the first sign that the broker has no room on its disk, until it stores something again."""
        self.connections = 0
        """How many have stood so far. What was subscribed on an earlier one is gone."""

    async def open(self, deadline_s: float) -> None:
        """Connect, trying until the deadline. Wrong credentials end it at once."""
        self._refused = asyncio.get_running_loop().create_future()
        self.nc, self._link = Client(), Link(secret="tls" in self._options)
        self.nc._transport = self._link  # the one private name of nats-py that is used; test_link.py would miss it
        task = asyncio.create_task(self._connect(self.nc))
        waited: set[asyncio.Future[Any]] = {task, self._refused}
        done, _ = await asyncio.wait(waited, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            task.result()
            return
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, NatsError, OSError):
            await task
        with contextlib.suppress(NatsError, OSError):
            await self.nc.close()
        if self._refused.done():
            raise BrokerRefuses(redact(self.url), self._refused.result())
        raise BrokerUnavailable(redact(self.url), self._last_error, deadline_s)

    async def _connect(self, nc: Client) -> None:
        await nc.connect(
            servers=self.url.split(","),
            name=self.name,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=self._on_closed,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RETRY_S,  # type: ignore[arg-type]  # a float works, the stub says int
            connect_timeout=2,
            ping_interval=5,
            max_outstanding_pings=2,
            **self._options,
        )
        self._mark_up()

    def _mark_up(self) -> None:
        self.connections += 1
        self._inbox = self._inbox or self.nc.new_inbox()  # for ever the same: answers may be due from before a restart
        self._deaf = None
        self._link.subscribe(f"{self._inbox}.*", self._on_reply)
        self._up.set()
        for listener in list(self._listeners):
            listener()

    @property
    def connected(self) -> bool:
        return self._up.is_set()

    @property
    def waits(self) -> bool:
        """The broker is away or cannot store, and that is no reason to give up."""
        return self.patient and not (self.connected and self.stores)

    @property
    def max_payload(self) -> int:
        return self.nc.max_payload

    async def wait_connected(self, timeout_s: float) -> bool:
        if self._up.is_set():
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        return self._up.is_set()

    def on_connect(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` whenever a new connection stands. Returns the call that ends this."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def on_denied(self, listener: Callable[[str, str], None]) -> None:
        """Call `listener(action, subject)` on a refused permission; the subject comes in lower case."""
        self._denied.append(listener)

    def off_denied(self, listener: Callable[[str, str], None]) -> None:
        self._denied.remove(listener)

    def expect(self, waiter: Waiter) -> str:
        """A reply subject whose answers go to `waiter`, until `forget`."""
        if self._deaf is not None:
            raise self._deaf
        self._tokens += 1
        token = str(self._tokens)
        self._waiters[token] = waiter
        return f"{self._inbox}.{token}"

    def forget(self, reply: str) -> None:
        self._waiters.pop(reply.rpartition(".")[2], None)

    def send(self, subject: str, payload: bytes, reply: str = "", headers: dict[str, str] | None = None) -> bool:
        """Hand a message to the socket. False if it cannot take it now. Whether it arrives only an answer can tell."""
        if not self._up.is_set() or not self._link.lives or self._link.backlog > WRITE_BACKLOG_BYTES:
            return False
        self._link.publish(subject, payload, reply, headers)
        return True

    def subscribe(self, callback: Callable[[Frame], None]) -> tuple[str, int]:
        """A new inbox whose messages go to `callback`, as long as this connection stands: (subject, id to unsubscribe)."""
        inbox = self.nc.new_inbox()
        return inbox, self._link.subscribe(inbox, callback)

    def unsubscribe(self, sid: int) -> None:
        self._link.unsubscribe(sid)

    async def request(self, subject: str, payload: bytes, deadline_s: float, *, once: bool = False) -> Frame:
        """One answer, asking again while nobody answers; so only for requests that may arrive twice. With `once` a lost
        connection ends it."""
        deadline = time.monotonic() + deadline_s
        seen = "not connected"
        while (left := deadline - time.monotonic()) > 0:
            if not await self.wait_connected(left):
                break
            waiter = Request(subject)
            reply = self.expect(waiter)
            try:
                if self.send(subject, payload, reply):
                    frame = await waiter.within(min(ATTEMPT_S, max(left, 0.01)))
                    if status_of(frame) != "503" or frame.data:
                        return frame
                    seen = "503: nobody listens there"
                await asyncio.sleep(RETRY_S)
            except (TimeoutError, Lost):
                seen = "no answer"
                if once:
                    break
            finally:
                self.forget(reply)
        raise RequestTimeout(redact(self.url), subject, deadline_s, seen)

    async def close(self) -> None:
        self._closing = True
        if self._reopening is not None:
            self._reopening.cancel()
        self._up.clear()
        for waiter in list(self._waiters.values()):
            waiter.fail(BrokerUnavailable(redact(self.url), "the connection was closed by this process", 0))
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            if self.nc.is_connected:
                await self.nc.flush(timeout=2)
        with contextlib.suppress(NatsError, OSError):  # nats-py raises if the broker is away
            await self.nc.close()

    def _on_reply(self, frame: Frame) -> None:
        waiter = self._waiters.get(frame.subject.rpartition(".")[2])
        if waiter is not None:
            waiter.answer(frame)

    # Callbacks of nats-py. One that raises ends its reconnecting for ever (nats-py #204), so none does.

    async def _on_error(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        denied = DENIED.search(self._last_error)
        if denied is not None:
            self._deny(denied[1], denied[2])
        elif self._is_final(error) and self._refused is not None and not self._refused.done():
            self._refused.set_result(self._last_error)
        else:
            log.debug("%s: %s", self.name, self._last_error)

    def _is_final(self, error: Exception) -> bool:
        return (
            isinstance(error, ssl.SSLCertVerificationError | NotSecret) or "authorization" in self._last_error.lower()
        )

    def _deny(self, action: str, subject: str) -> None:
        # nats-py lowers the server's text, so subjects are compared lowered.
        error = AccessDenied(redact(self.url), action, subject)
        if subject == f"{self._inbox}.*".lower():
            self._deaf = error
        told = False
        for waiter in list(self._waiters.values()):
            if self._deaf is not None or waiter.subject.lower() == subject:
                waiter.fail(error)
                told = True
        for listener in list(self._denied):
            listener(action, subject)
        if not told:
            log.error("%s", error)

    async def _on_disconnect(self) -> None:
        self._up.clear()
        for waiter in list(self._waiters.values()):
            if isinstance(waiter, Request):
                waiter.fail(Lost())
        if not self._closing:
            log.warning("%s: lost the broker at %s (%s); reconnecting", self.name, redact(self.url), self._last_error)

    async def _on_reconnect(self) -> None:
        log.info("%s: reconnected to %s", self.name, redact(self.url))
        self._mark_up()

    async def _on_closed(self) -> None:
        # nats-py gives up for good on some server errors (an expired login, say). A service must not.
        self._up.clear()
        if not self._closing and (self._reopening is None or self._reopening.done()):
            self._reopening = asyncio.create_task(self._reopen())

    async def _reopen(self) -> None:
        while not self._closing:
            try:
                await self.open(deadline_s=10)
                return
            except BrokerUnavailable as error:
                log.warning("%s: %s", self.name, error)
                await asyncio.sleep(1)
