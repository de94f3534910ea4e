"""A tool's hold on a run: connection, queue, config bucket and registry, closed together.

The command line, the audit and the live view all reach a run through `attach`. It changes nothing in the run: a tool is a
reader, and a run that does not exist is an error here instead of being invented by a misspelt name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shared import config as run_config
from shared.config import ConfigError, RunConfig
from shared.jetstream import Connection
from shared.kv import KV
from shared.registry import TTL_S, Registry
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue

CONNECT_DEADLINE_S = 10.0


@dataclass(slots=True)
class Run:
    """One run at one broker."""

    name: str
    url: str
    subjects: Subjects
    connection: Connection
    queue: TransferQueue
    kv: KV
    registry: Registry

    async def config(self) -> RunConfig:
        if (entry := await self.kv.get("config")) is None:
            raise ConfigError(f"the run {self.name!r} has no config yet; start it with `slipstream up`")
        return run_config.loads(entry[0])

    async def state(self) -> str:
        """running | finished | failed:<why>, '' before the first start."""
        entry = await self.kv.get("state")
        return entry[0].decode() if entry else ""

    async def set_state(self, state: str) -> None:
        await self.kv.put("state", state.encode())


@asynccontextmanager
async def attach(url: str, name: str, *, create: bool = False, replicas: int = 1) -> AsyncIterator[Run]:
    """The run `name` at the broker `url`; with `create`, its buckets are made on so many nodes if need be. Raises
    BrokerUnavailable, NotJetStream, BucketMissing (unless `create`)."""
    subjects = Subjects(name)
    connection = await Connection.open(url, name=f"{name}/tool", deadline_s=CONNECT_DEADLINE_S)
    try:
        kv = await KV.open(connection, subjects.config_bucket, create=create, replicas=replicas)
        services = await KV.open(connection, subjects.services_bucket, ttl=True, create=create, replicas=replicas)
        queue = TransferQueue(connection, subjects)
        yield Run(name, url, subjects, connection, queue, kv, Registry(services, TTL_S))
    finally:
        await connection.close()
