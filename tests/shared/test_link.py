"""Messages come out whole however the bytes were cut, over plain and over encrypted sockets."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.broker import EmbeddedBroker
from shared.link import LONGEST_LINE, Frame, FrameReader, Link, encode_headers, parse_headers, publish_command
from tests.shared.runs import open_queue, until

SUBJECT = st.from_regex(r"[a-zA-Z0-9_$-]{1,10}(\.[a-zA-Z0-9_$-]{1,10}){0,3}", fullmatch=True)
HEADERS = st.none() | st.dictionaries(
    st.from_regex(r"[A-Za-z][A-Za-z-]{0,12}", fullmatch=True).filter(
        lambda name: name not in ("Status", "Description")
    ),
    st.from_regex(r"([!-~]([ -~]{0,20}[!-~])?)?", fullmatch=True),
    max_size=3,
)
MESSAGE = st.tuples(SUBJECT, st.integers(1, 99), st.just("") | SUBJECT, HEADERS, st.binary(max_size=300))
LINE = st.sampled_from(
    [b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b'INFO {"a": 1}\r\n', b"-ERR 'Permissions Violation'\r\n"]
)


def from_server(message: tuple[str, int, str, dict[str, str] | None, bytes]) -> bytes:
    subject, sid, reply, headers, data = message
    middle = f" {reply}" if reply else ""
    if headers is None:
        return f"MSG {subject} {sid}{middle} {len(data)}\r\n".encode() + data + b"\r\n"
    block = encode_headers(headers)
    line = f"HMSG {subject} {sid}{middle} {len(block)} {len(block) + len(data)}\r\n"
    return line.encode() + block + data + b"\r\n"


def feed(reader: FrameReader, data: bytes, cuts: list[int]) -> None:
    edges = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    for start, end in pairwise(edges):
        for at in range(start, end, 100_000):
            piece = data[at : min(end, at + 100_000)]
            room = reader.room()
            assert len(room) >= len(piece)
            room[: len(piece)] = piece
            reader.advance(len(piece))


@given(items=st.lists(MESSAGE | LINE, max_size=8), cuts=st.lists(st.integers(0, 3000), max_size=20))
def test_frames_and_lines_come_out_as_they_were_sent(items: list[Any], cuts: list[int]) -> None:
    frames: list[Frame] = []
    lines: list[bytes] = []
    feed(
        FrameReader(frames.append, lines.append),
        b"".join(item if isinstance(item, bytes) else from_server(item) for item in items),
        cuts,
    )
    assert lines == [item for item in items if isinstance(item, bytes)]
    assert [(f.subject, f.sid, f.reply, f.headers, f.data) for f in frames] == [
        item for item in items if not isinstance(item, bytes)
    ]


@pytest.mark.parametrize("size", [0, 1, 250_000, 1_200_000, 5_000_000])
def test_payloads_of_any_size(size: int) -> None:
    frames: list[Frame] = []
    reader = FrameReader(frames.append, lambda line: None)
    payloads = [bytes([i]) * (size + i) for i in range(5)]
    stream = b"".join(from_server(("a.b", 1, "", {"Nats-Msg-Id": "x"}, payload)) for payload in payloads)
    feed(reader, stream, list(range(0, len(stream), 70_001)))
    assert [frame.data for frame in frames] == payloads


def test_line_without_an_end_is_refused() -> None:
    reader = FrameReader(lambda frame: None, lambda line: None)
    with pytest.raises(ValueError, match="without an end"):
        for _ in range(LONGEST_LINE // 1000 + 2):
            feed(reader, b"x" * 1000, [])


@pytest.mark.parametrize("line", [b"MSG a b 3\r\nabc\r\n", b"MSG a 1 x\r\n", b"HMSG a 1 y 3\r\nabc\r\n"])
def test_broken_control_line_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        feed(FrameReader(lambda frame: None, lambda line: None), line, [])


def test_status_of_the_server() -> None:
    assert parse_headers(b"NATS/1.0 503\r\n\r\n") == {"Status": "503", "Description": ""}
    assert parse_headers(b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 5\r\n\r\n") == {
        "Status": "408",
        "Description": "Request Timeout",
        "Nats-Pending-Messages": "5",
    }


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB b 0", "\t"])
def test_subject_that_is_none(subject: str) -> None:
    with pytest.raises(ValueError, match="not a subject"):
        publish_command(subject, b"", "", None)


def test_header_that_would_break_the_protocol() -> None:
    with pytest.raises(ValueError, match="line break"):
        publish_command("a", b"", "", {"Nats-Msg-Id": "x\r\nNats-TTL: 1s"})


async def test_subscriber_that_fails_harms_nobody_else(broker: EmbeddedBroker, connect: Any) -> None:
    connection = await connect(broker.url)
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
    received: list[Frame] = []
    bad, _ = connection.bulk.subscribe(lambda frame: 1 / 0)
    good, _ = connection.bulk.subscribe(received.append)
    connection.bulk.send(bad, b"x")
    connection.bulk.send(good, b"y")
    await until(lambda: received, "the other subscriber hears")
    assert isinstance(failures[0]["exception"], ZeroDivisionError)
    assert bad in failures[0]["message"]


async def test_unsubscribed_inbox_is_silent(broker: EmbeddedBroker, connect: Any) -> None:
    connection = await connect(broker.url)
    received: list[Frame] = []
    first, sid = connection.bulk.subscribe(received.append)
    second, _ = connection.bulk.subscribe(received.append)
    connection.bulk.unsubscribe(sid)
    for inbox in (first, second):
        connection.bulk.send(inbox, inbox.encode())
    await until(lambda: received, "the second hears")
    assert [frame.subject for frame in received] == [second]


def test_a_socket_that_the_other_side_has_closed_takes_nothing_and_raises_nothing() -> None:
    """As when a broker is killed, before nats-py hears of it. uvloop, which the services run on, raises on such writes."""
    uvloop = pytest.importorskip("uvloop")

    async def run() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        link = Link()
        port = server.sockets[0].getsockname()[1]
        await link.connect(urlparse(f"nats://127.0.0.1:{port}"), 0, 60)
        await until(lambda: not link.lives, "the other side has closed")
        assert await link.read(1) == b""
        link.publish("a", b"payload", "", None)
        link.write(b"PING\r\n")
        link.unsubscribe(link.subscribe("a", lambda frame: None))
        assert link.backlog == 0
        await link.wait_closed()
        server.close()

    uvloop.run(run())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
async def test_over_tls(tmp_path: Path, connect: Any, run_name: str) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command, *names], check=True, capture_output=True)  # noqa: ASYNC221  # nothing else runs yet
    tls = {"cert_file": str(cert), "key_file": str(key)}
    trusting = ssl.create_default_context(cafile=str(cert))
    with EmbeddedBroker(tmp_path / "store", options={"tls": tls}) as broker:
        url = broker.url.replace("nats://", "tls://")
        queue = await open_queue(await connect(url, options={"tls": trusting}), run_name)
        payload = bytes(range(256)) * 3000
        for attempt in range(2):
            await queue.publish(queue.subjects.prompts, payload)
            puller = await queue.pull("prompts", "worker", prefetch=0)
            delivery = await puller.next(60)
            assert delivery is not None
            assert delivery.data == payload
            await delivery.ack()
            await puller.stop()
            if attempt == 0:
                await asyncio.to_thread(broker.kill)
                await asyncio.to_thread(broker.start)
