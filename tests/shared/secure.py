"""A broker as `slipstream broker init` configures it, on loopback: one node, or a cluster of three."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

import pytest

from services.controller.broker_setup import folder as setup
from services.controller.broker_setup import server_config
from services.controller.broker_setup.certificates import RENEW_DAYS
from services.controller.launchers.broker import free_port
from shared import credentials
from shared.broker import find_binary, serves_jetstream
from shared.errors import ApiError, RequestTimeout
from shared.jetstream import Connection
from shared.kv import KV
from shared.subjects import Subjects

START_DEADLINE_S = 120.0


class SecureBroker:
    """Start it as a context manager. Its nodes have an address of loopback each, and one port."""

    def __init__(self, folder: Path, runs: list[str], days: int = RENEW_DAYS + 1, nodes: int = 1) -> None:
        self.folder, self.port = folder, free_port()
        self.hosts = [f"127.0.0.{number}" for number in range(1, nodes + 1)]
        plan = setup.extend(setup.Plan(), runs, self.hosts, [], store="STORE", days=days, port=self.port)
        setup.write(folder / "secrets", plan)
        self.secrets, self.clients = folder / "secrets", folder / "secrets" / "clients"
        self._route_port = free_port()
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return ",".join(f"tls://{host}:{self.port}" for host in self.hosts)

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def start(self, host: str) -> None:
        text = (self.secrets / "nodes" / host / "server.conf").read_text()
        monitor = f'http: "127.0.0.1:{server_config.MONITOR_PORT}"\n'
        assert monitor in text
        text = text.replace(monitor, "").replace("0.0.0.0", host).replace('"STORE"', f'"{self.folder / host}"')
        text = text.replace(f":{server_config.ROUTE_PORT}", f":{self._route_port}")
        config = self.folder / f"{host}.conf"
        config.write_text(text)
        setpriv = shutil.which("setpriv")
        tie = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        with (self.folder / f"{host}.log").open("ab") as log:
            self._nodes[host] = subprocess.Popen([*tie, str(find_binary()), "-c", str(config)], stderr=log)

    def wait(self) -> None:
        """Until every node that was started serves."""
        deadline = time.monotonic() + START_DEADLINE_S
        for host, process in self._nodes.items():
            while not serves_jetstream(host, self.port):
                assert process.poll() is None, self.log()
                assert time.monotonic() < deadline, self.log()
                time.sleep(0.05)

    async def formed(self, run: str) -> None:
        """Until its nodes know each other well enough to place a stream of `run` on all of them."""
        connection = await Connection.open(
            self.url, name="test", options=self.options("operator"), deadline_s=START_DEADLINE_S
        )
        bucket, deadline = Subjects(run).config_bucket, time.monotonic() + START_DEADLINE_S
        try:
            while True:
                try:
                    (await KV.open(connection, bucket, replicas=len(self.hosts))).close()
                    return
                except (ApiError, RequestTimeout):
                    assert time.monotonic() < deadline, self.log()
                    await asyncio.sleep(0.1)
        finally:
            await connection.close()

    def kill(self, host: str) -> None:
        process = self._nodes.pop(host)
        process.kill()
        process.wait()

    def __enter__(self) -> Self:
        for host in self.hosts:
            self.start(host)
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        for host in list(self._nodes):
            self.kill(host)

    def options(self, role: str) -> dict[str, Any]:
        """nats-py's for a client of that role."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(credentials.CREDENTIALS, str(self.clients / role))
            return credentials.options()
