"""The private broker of a run without a `broker.url`: store in `<workdir>/broker`, address in `<workdir>/broker.json`.

Guarantees: one broker a store, whoever asks. A broker that is still there (after `--keep-broker`, or because its `slipstream up`
was killed) is taken over at its address; one that is not is started on the same store. The port stays the same over restarts
wherever it is still free. `tests/controller/test_private_broker.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shared.broker import BrokerError, EmbeddedBroker, PortTaken, serves_jetstream
from shared.config import RunConfig
from shared.sections import BrokerConfig

STOP_DEADLINE_S = 10.0
PORT_TRIES = 3
LOWEST_PORT = 10_000


@dataclass(slots=True, frozen=True)
class Address:
    """What broker.json says."""

    url: str
    pid: int
    port: int


class PrivateBroker:
    """The broker on one store: found running, or started."""

    def __init__(self, workdir: Path, config: BrokerConfig) -> None:
        self.store, self.file = workdir / "broker", workdir / "broker.json"
        self.config = config
        self._own: EmbeddedBroker | None = None
        self._address: Address | None = None

    @property
    def url(self) -> str:
        return self._known.url

    @property
    def pid(self) -> int:
        return self._known.pid

    @property
    def _known(self) -> Address:
        if self._address is None:
            raise BrokerError("the broker is not running")
        return self._address

    @property
    def running(self) -> bool:
        if self._own is not None:
            return self._own.running
        return self._address is not None and self._serves_store(self._address)

    def serves(self) -> bool:
        """It greets whoever connects. False also for one that lives and hangs."""
        return serves_jetstream(EmbeddedBroker.host, self._known.port)

    def found(self) -> bool:
        """Take over a broker that serves the store already. False if there is none."""
        address = read_address(self.file)
        if address is None or not self._serves_store(address):
            return False
        self._address = address
        return True

    def start(self) -> PrivateBroker:
        """Serve the store. Raises BrokerError."""
        if self.found():
            return self
        before = read_address(self.file)
        ports = [self.config.port] if self.config.port else [before.port if before else free_port()]
        ports += [] if self.config.port else [free_port() for _ in range(PORT_TRIES)]
        for number, port in enumerate(ports, 1):
            try:
                self._own = self._embedded(port).start()
                break
            except PortTaken:
                if number == len(ports):
                    raise
        assert self._own is not None
        self._tell(self._own)
        return self

    def restart(self) -> None:
        """After it died, or in place of one that hangs: the same store at the same address. Raises BrokerError."""
        if self.running:
            os.kill(self.pid, signal.SIGKILL)
            self._until_gone()
        broker = self._own or self._embedded(self._known.port)
        self._own = broker.restart()
        self._tell(self._own)

    def stop(self) -> None:
        """SIGTERM and wait, whoever started it."""
        if self._own is not None:
            self._own.stop()
        elif self._address is not None and self._serves_store(self._address):
            os.kill(self._address.pid, signal.SIGTERM)
            self._until_gone()

    def _until_gone(self) -> None:
        deadline = time.monotonic() + STOP_DEADLINE_S
        while self.running and time.monotonic() < deadline:
            time.sleep(0.05)

    def _embedded(self, port: int) -> EmbeddedBroker:
        sync: Literal["default", "always"] = "always" if self.config.durability == "power" else "default"
        return EmbeddedBroker(self.store, port, sync, self.config.options)

    def _tell(self, broker: EmbeddedBroker) -> None:
        self._address = Address(broker.url, broker.pid, broker.port)
        text = json.dumps({"url": broker.url, "pid": broker.pid, "port": broker.port, "store": str(self.store)})
        partial = self.file.with_suffix(".tmp")
        partial.write_text(text + "\n")
        partial.replace(self.file)

    def _serves_store(self, address: Address) -> bool:
        """The pid may belong to somebody else by now: only a process that was started on this store counts."""
        try:
            command = Path(f"/proc/{address.pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return str(self.store / "nats-server.conf").encode() in command


def read_address(file: Path) -> Address | None:
    """None if there is no broker.json, or only half of one."""
    try:
        data = json.loads(file.read_text())
        return Address(data["url"], int(data["pid"]), int(data["port"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def free_port() -> int:
    """A port of loopback that was free just now, below those that the system gives to whoever dials: so it is still free when the
    broker comes back to it."""
    for _ in range(PORT_TRIES):
        port = LOWEST_PORT + secrets.randbelow(_first_dialling_port() - LOWEST_PORT)
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind((EmbeddedBroker.host, port))
            return port
    with closing(socket.socket()) as probe:
        probe.bind((EmbeddedBroker.host, 0))
        return int(probe.getsockname()[1])


def _first_dialling_port() -> int:
    with suppress(OSError, ValueError, IndexError):
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        return max(first, LOWEST_PORT + 1)
    return 32768


@asynccontextmanager
async def serving(config: RunConfig) -> AsyncIterator[str]:
    """The address of the run's broker, for the time of a command: the one in use, or the store's own, started for this."""
    if config.broker.url:
        yield config.broker.url
        return
    broker = PrivateBroker(config.work_path, config.broker)
    if not broker.store.is_dir():
        raise BrokerError(
            f"no run here: {broker.store} does not exist. Start it with `slipstream up`, or name another run file"
        )
    found = broker.found()
    if not found:
        await asyncio.to_thread(broker.start)
    try:
        yield broker.url
    finally:
        if not found:
            await asyncio.to_thread(broker.stop)
