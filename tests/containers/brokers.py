"""Brokers in containers, of any version: one node, or a cluster of three, on what `slipstream broker init` writes.

testcontainers starts and removes them. Each node publishes its port on loopback, the same one over `kill` and `start`; its disk
is the container's, which a SIGKILL leaves as it was. testcontainers is imported where it is used: `make test` has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any, Self

import pytest

from services.controller.broker_setup import folder as setup
from services.controller.broker_setup import server_config
from services.controller.launchers.broker import free_port
from shared import credentials
from shared.broker import serves_jetstream

START_DEADLINE_S = 120.0
MOUNTED_AT = "/etc/slipstream"


class ContainerBroker:
    """Start it as a context manager."""

    def __init__(self, folder: Path, runs: list[str], image: str, nodes: int = 1) -> None:
        self.hosts = [f"n{number}" for number in range(1, nodes + 1)]
        plan = setup.extend(setup.Plan(), runs, self.hosts, [], store="/data", mounted_at=MOUNTED_AT)
        setup.write(folder / "secrets", plan)
        self._image, self._nodes = image, folder / "secrets" / "nodes"
        self.clients = folder / "secrets" / "clients"
        self._ports = {host: free_port() for host in self.hosts}
        self._containers: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()

    @property
    def url(self) -> str:
        return ",".join(f"tls://127.0.0.1:{port}" for port in self._ports.values())

    def __enter__(self) -> Self:
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.network import Network

        with self._stack:
            network = self._stack.enter_context(Network())
            for host in self.hosts:
                container = DockerContainer(self._image).with_network(network).with_network_aliases(host)
                container.with_command(["-c", f"{MOUNTED_AT}/server.conf"])
                container.with_volume_mapping(self._nodes / host, MOUNTED_AT, "ro")
                container.ports[f"{server_config.CLIENT_PORT}/tcp"] = ("127.0.0.1", self._ports[host])
                self._containers[host] = self._stack.enter_context(container)
            for host in self.hosts:
                self._wait(host)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def kill(self, host: str = "n1") -> None:
        """SIGKILL."""
        self._containers[host].get_wrapped_container().kill()

    def start(self, host: str = "n1") -> None:
        """After `kill`. Returns once it serves."""
        self._containers[host].get_wrapped_container().start()
        self._wait(host)

    async def die_and_return(self, host: str = "n1", pause_s: float = 0.2) -> None:
        await asyncio.to_thread(self.kill, host)
        await asyncio.sleep(pause_s)
        await asyncio.to_thread(self.start, host)

    def log(self) -> str:
        return "\n".join(f"{host}:\n{b''.join(one.get_logs()).decode()}" for host, one in self._containers.items())

    def options(self, role: str) -> dict[str, Any]:
        """nats-py's for a client of that role."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(credentials.CREDENTIALS, str(self.clients / role))
            return credentials.options()

    def monitor(self, host: str, page: str) -> dict[str, Any]:
        """A page of a node's monitoring, which listens inside the container only."""
        url = f"http://127.0.0.1:{server_config.MONITOR_PORT}/{page}"
        done = self._containers[host].exec(["wget", "-q", "-O", "-", url])
        return json.loads(done.output) if done.exit_code == 0 else {}

    def _wait(self, host: str) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while not serves_jetstream("127.0.0.1", self._ports[host]):
            assert time.monotonic() < deadline, f"{host} does not serve\n{self.log()}"
            time.sleep(0.1)
