"""The bytes between a nats-py client and its server: messages are cut out here and go straight to whoever waits for them.

nats-py keeps what it is good at: servers, login, TLS, pings and reconnecting. Its read loop copies a payload five times and
gives each message a queue and a task; this transport takes its place under the same client, reads into one buffer, copies a
payload once, and calls the subscriber. What is not a message (INFO, PING, PONG, +OK, -ERR) is passed on to nats-py.

Guarantees: frames come out whole and in order however the bytes were cut; a subscriber that raises is reported and harms
nobody else. tests/shared/test_link.py holds the first for arbitrary cuts, benchmarks/transfer_queue.py the cost.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import ParseResult

from nats.aio.transport import Transport

log = logging.getLogger("slipstream.transport")

READ_BYTES = 256 << 10
"""Least room for a read. More reads than messages is what costs."""
LONGEST_LINE = 64 << 10
"""A control line without an end is not NATS."""
CLOSE_S = 2.0
CRLF = b"\r\n"
HEADER_START = b"NATS/1.0"


class Frame:
    """A message from the server."""

    __slots__ = ("data", "headers", "reply", "sid", "subject")

    def __init__(self, subject: str, sid: int, reply: str, headers: dict[str, str] | None, data: bytes) -> None:
        self.subject, self.sid, self.reply, self.headers, self.data = subject, sid, reply, headers, data


def parse_headers(block: bytes) -> dict[str, str]:
    """Headers by name. A status that the server made up itself comes as `Status` and `Description`."""
    first, *lines = block.decode("utf-8", "replace").split("\r\n")
    headers = {}
    if status := first[len(HEADER_START) :].strip():
        headers["Status"], _, headers["Description"] = status.partition(" ")
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name] = value.strip()
    return headers


def encode_headers(headers: dict[str, str]) -> bytes:
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError(f"a header may not hold a line break: {headers}")
    return "\r\n".join([HEADER_START.decode(), *lines, "", ""]).encode()


def publish_command(subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> list[bytes]:
    """The pieces of a PUB or HPUB, not joined: the payload is not copied."""
    if len(subject.split()) != 1 or " " in reply:
        raise ValueError(f"not a subject: {subject!r}")
    if headers is None:
        return [f"PUB {subject} {reply} {len(payload)}\r\n".encode(), payload, CRLF]
    block = encode_headers(headers)
    line = f"HPUB {subject} {reply} {len(block)} {len(block) + len(payload)}\r\n"
    return [line.encode() + block, payload, CRLF]


class FrameReader:
    """Cuts the stream of bytes. Fill `room()`, then call `advance(n)`: messages go to `on_frame`, other lines to `on_line`."""

    def __init__(self, on_frame: Callable[[Frame], None], on_line: Callable[[bytes], None]) -> None:
        self._on_frame, self._on_line = on_frame, on_line
        self._buffer = bytearray(4 * READ_BYTES)
        self._start = self._end = 0
        self._needed = 0
        """Bytes of the frame at `_start`, once its control line has been read; 0 before."""
        self._control: list[bytes] = []
        self._line_bytes = 0

    def room(self) -> memoryview:
        """Where the next bytes go. What is unread moves to the front when the end is near."""
        unread = self._end - self._start
        wanted = max(READ_BYTES, self._needed - unread)
        if len(self._buffer) - self._end < wanted:
            if unread + wanted > len(self._buffer):
                larger = bytearray(unread + wanted + READ_BYTES)
                larger[:unread] = self._buffer[self._start : self._end]
                self._buffer = larger
            else:
                self._buffer[:unread] = self._buffer[self._start : self._end]
            self._start, self._end = 0, unread
        return memoryview(self._buffer)[self._end :]

    def advance(self, count: int) -> None:
        """`count` bytes were written to `room()`. Raises ValueError if they are not NATS."""
        self._end += count
        while self._start < self._end:
            if not self._needed and not self._read_line():
                break
            if self._needed:
                if self._end - self._start < self._needed:
                    break
                self._read_message()
        if self._start == self._end:
            self._start = self._end = 0

    def _read_line(self) -> bool:
        at = self._buffer.find(CRLF, self._start, self._end)
        if at < 0:
            if self._end - self._start > LONGEST_LINE:
                raise ValueError("a control line without an end")
            return False
        line = bytes(memoryview(self._buffer)[self._start : at + 2])
        if line.startswith((b"MSG ", b"HMSG ")):
            self._control = line.split()
            self._line_bytes = len(line)
            self._needed = len(line) + int(self._control[-1]) + 2
            return True
        self._start = at + 2
        self._on_line(line)
        return True

    def _read_message(self) -> None:
        control, view = self._control, memoryview(self._buffer)
        body, end = self._start + self._line_bytes, self._start + self._needed - 2
        headers = None
        if control[0] == b"HMSG":
            size = int(control[-2])
            headers = parse_headers(bytes(view[body : body + size]))
            body += size
            control = control[:-1]
        reply = control[3].decode() if len(control) == 5 else ""
        frame = Frame(control[1].decode(), int(control[2]), reply, headers, bytes(view[body:end]))
        self._start, self._needed = end + 2, 0
        self._on_frame(frame)


class LinkProtocol(asyncio.BufferedProtocol):
    """One socket's life. Lines for nats-py go into `lines`."""

    def __init__(self, on_frame: Callable[[Frame], None]) -> None:
        self.lines = asyncio.StreamReader()
        self.reader = FrameReader(on_frame, self.lines.feed_data)
        self.transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self.reader.advance(nbytes)
        except ValueError as error:
            self.connection_lost(ConnectionError(f"not the NATS protocol: {error}"))
            if self.transport is not None:
                self.transport.abort()

    def eof_received(self) -> None:
        self.lines.feed_eof()

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and self.lines.exception() is None:
            self.lines.set_exception(exc)
        else:
            self.lines.feed_eof()
        self._writable.set()
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def drain(self) -> None:
        await self._writable.wait()


class NotSecret(ConnectionError):
    """Nothing may be said to this server: it would be in the clear."""


class Link(Transport):
    """The transport under a nats-py client. `route(sid, callback)` says where a subscription's messages go. A `secret` one
    sends nothing before TLS stands."""

    def __init__(self, secret: bool = False) -> None:
        self._secret, self._secured = secret, False
        self._protocol: LinkProtocol | None = None
        self._routes: dict[int, Callable[[Frame], None]] = {}
        self._sid = 0

    # What nats-py calls

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        self._routes.clear()
        self._secured = False
        loop = asyncio.get_running_loop()
        protocol = LinkProtocol(self._on_frame)
        connecting = loop.create_connection(lambda: protocol, uri.hostname or "", uri.port or 4222)
        await asyncio.wait_for(connecting, connect_timeout)
        self._protocol = protocol

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        plain = self._open
        assert plain.transport is not None
        secured = LinkProtocol(self._on_frame)
        name = uri if isinstance(uri, str) else uri.hostname
        upgrade = asyncio.get_running_loop().start_tls(plain.transport, secured, ssl_context, server_hostname=name)
        transport = await asyncio.wait_for(upgrade, connect_timeout)
        assert transport is not None
        secured.connection_made(transport)
        self._protocol, self._secured = secured, True

    def write(self, payload: bytes) -> None:
        if self._secret and not self._secured:
            raise NotSecret("the server does not offer TLS")  # nats-py would go on in the clear
        if (transport := self._living) is not None:
            transport.write(payload)

    def writelines(self, payload: list[bytes]) -> None:
        if (transport := self._living) is not None:
            transport.writelines(payload)

    async def read(self, buffer_size: int) -> bytes:
        return await self._open.lines.read(buffer_size)

    async def readline(self) -> bytes:
        return await self._open.lines.readline()

    async def drain(self) -> None:
        await self._open.drain()

    async def wait_closed(self) -> None:
        """The socket first sends what waits for it; one whose other side does not read is cut off."""
        protocol = self._protocol
        if protocol is None or protocol.transport is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(protocol.closed)
        except TimeoutError:
            protocol.transport.abort()

    def close(self) -> None:
        if self._protocol is not None and self._protocol.transport is not None:
            self._protocol.transport.close()

    def at_eof(self) -> bool:
        return self._protocol is None or self._protocol.lines.at_eof()

    def __bool__(self) -> bool:
        return True  # nats-py puts a transport of its own in the place of one that is not there yet

    # What the channel calls

    def publish(self, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> None:
        self.writelines(publish_command(subject, payload, reply, headers))

    @property
    def backlog(self) -> int:
        """Bytes that wait for the socket."""
        transport = self._living
        return transport.get_write_buffer_size() if transport is not None else 0

    @property
    def lives(self) -> bool:
        """What is written now may arrive."""
        return self._living is not None

    @property
    def _living(self) -> asyncio.Transport | None:
        """None also for a socket that the other side has closed, before nats-py hears of it: uvloop raises a RuntimeError on
        writes to it, which would end the client's reconnecting for ever."""
        transport = self._protocol.transport if self._protocol is not None else None
        return None if transport is None or transport.is_closing() else transport

    def subscribe(self, subject: str, callback: Callable[[Frame], None]) -> int:
        """Ask for a subject's messages, on this connection: a new one starts without subscriptions."""
        self._sid += 1
        self._routes[self._sid] = callback
        self.write(f"SUB {subject} {self._sid}\r\n".encode())
        return self._sid

    def unsubscribe(self, sid: int) -> None:
        if self._routes.pop(sid, None) is not None:
            self.write(f"UNSUB {sid}\r\n".encode())

    def _on_frame(self, frame: Frame) -> None:
        callback = self._routes.get(frame.sid)
        if callback is None:
            return
        try:
            callback(frame)
        except Exception as error:  # noqa: BLE001  # whatever a subscriber does, the connection serves the others
            context: dict[str, Any] = {"message": f"a subscriber of {frame.subject!r} failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    @property
    def _open(self) -> LinkProtocol:
        if self._protocol is None:
            raise ConnectionError("not connected")
        return self._protocol
