"""Who is there: heartbeats with a time to live, and the lease of a service of which one may be active.

Guarantees: a replica whose heartbeat stopped is gone after the TTL, without anyone's help; of two that claim a service at
once one gets it; a holder that died frees its lease by the TTL, or at once for a claimer on the same host that sees its
process gone; a holder that lost its lease hears of it at its next beat (`LeaseLost`). tests/shared/test_registry.py.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shared import wire
from shared.errors import AlreadyActive, Conflict, KeyExists, LeaseLost, TransportError
from shared.jetstream import Connection
from shared.kv import KV
from shared.records import Heartbeat
from shared.subjects import Subjects
from shared.wanted import Launcher

TTL_S = 15.0
BEATS = "beat"
LEASES = "lease"
LAUNCHERS = "launcher"
TRIES = 5


@wire.schema("lease", 1)
@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What the key of a lease holds: enough to say who it is, and for a neighbour to see whether it lives."""

    service: str
    replica: str
    token: str
    host: str
    pid: int
    pid_started: int
    since: float

    def __str__(self) -> str:
        since = time.strftime("%F %T", time.gmtime(self.since))
        return f"replica {self.replica!r}, pid {self.pid} on {self.host}, since {since} UTC"


class Registry:
    """The services of one run. Write with `beat` from the worker's own loop, read with `alive`."""

    def __init__(self, kv: KV, ttl_s: float) -> None:
        self._kv, self.ttl_s = kv, ttl_s
        self._leases: dict[str, Lease] = {}

    @classmethod
    async def open(
        cls, connection: Connection, subjects: Subjects, ttl_s: float = TTL_S, *, create: bool = True
    ) -> Registry:
        return cls(await KV.open(connection, subjects.services_bucket, ttl=True, create=create), ttl_s)

    async def beat(self, heartbeat: Heartbeat) -> None:
        """Write the heartbeat, and renew the lease if this process holds one for the service. Raises LeaseLost."""
        key = f"{BEATS}.{_token(heartbeat.service)}.{_token(heartbeat.replica)}"
        await self._kv.put(key, wire.encode(heartbeat), ttl_s=self.ttl_s)
        if (lease := self._leases.get(heartbeat.service)) is not None:
            await lease.renew()

    async def probe(self, deadline_s: float) -> bool:
        """Whether the broker stores what is written now: a silent replica may be one that is not heard."""
        try:
            async with asyncio.timeout(deadline_s):
                await self._kv.put("probe", b"", ttl_s=self.ttl_s)
        except (TransportError, TimeoutError):
            return False
        return True

    async def assure(self, service: str) -> bool:
        """Before anything that only the active one may do: whether this process has held the lease of `service` without a break.
        False after it stood still, or did not reach the broker, for longer than the TTL: another may have been active since, so
        it has to look first at what was done. Raises LeaseLost if another is active now."""
        if (lease := self._leases.get(service)) is None:
            return True
        if _now() - lease.renewed > self.ttl_s / 2:
            await lease.renew()
        broken, lease.broken = lease.broken, False
        return not broken

    async def leave(self, service: str, replica: str) -> None:
        """Take the heartbeat away: a replica that stops on purpose is gone at once."""
        await self._kv.delete(f"{BEATS}.{_token(service)}.{_token(replica)}")

    async def withdraw(self, mine: Heartbeat) -> None:
        """As `leave`, for a process that fails: but not if another one beats under this name by now."""
        entry = await self._kv.get(f"{BEATS}.{_token(mine.service)}.{_token(mine.replica)}")
        if entry is None:
            return
        there = wire.decode(entry[0], Heartbeat)
        if (there.host, there.pid) == (mine.host, mine.pid):
            await self.leave(mine.service, mine.replica)

    async def alive(self, service: str | None = None) -> list[Heartbeat]:
        """The newest heartbeat of every replica that has one, by service and replica."""
        found = await self._kv.values(BEATS if service is None else f"{BEATS}.{_token(service)}")
        return [wire.decode(found[key], Heartbeat) for key in sorted(found)]

    async def present(self, launcher: Launcher) -> None:
        """Tell that a launcher is there. It is forgotten after the TTL, as a replica is."""
        await self._kv.put(f"{LAUNCHERS}.{_token(launcher.name)}", wire.encode(launcher), ttl_s=self.ttl_s)

    async def launchers(self) -> list[Launcher]:
        """Those that start and end replicas of this run now."""
        keys = [key for key in await self._kv.keys() if key.startswith(f"{LAUNCHERS}.")]
        found = await asyncio.gather(*(self._kv.get(key) for key in keys))
        return [wire.decode(value[0], Launcher) for value in found if value is not None]

    async def living(self, replicas: Iterable[str]) -> set[str]:
        """Those of `replicas`, of whatever service, that have a heartbeat. One round trip, however many there are."""
        beating = {key.rpartition(".")[2] for key in await self._kv.keys() if key.startswith(f"{BEATS}.")}
        return {replica for replica in replicas if _token(replica) in beating}

    async def claim(self, service: str, replica: str = "") -> Lease:
        """Become the active one. Raises AlreadyActive, naming the holder."""
        record = LeaseRecord(
            service,
            replica,
            uuid.uuid4().hex,
            socket.gethostname(),
            os.getpid(),
            process_start(os.getpid()),
            time.time(),
        )
        key, value = f"{LEASES}.{_token(service)}", wire.encode(record)
        try:
            revision = await self._kv.create(key, value, ttl_s=self.ttl_s)
        except KeyExists as error:
            revision = await self._take_over(key, record, value, error)
        lease = Lease(self, key, record, revision)
        self._leases[service] = lease
        return lease

    async def _take_over(self, key: str, record: LeaseRecord, value: bytes, error: KeyExists) -> int:
        held = await self._kv.get(key)
        try:
            if held is None:  # it ran out in between
                return await self._kv.create(key, value, ttl_s=self.ttl_s)
            holder = wire.decode(held[0], LeaseRecord)
            if is_dead(holder):
                return await self._kv.update(key, value, held[1], ttl_s=self.ttl_s)
        except (Conflict, KeyExists) as beaten:
            raise AlreadyActive(record.service, "another process took it over just now") from beaten
        raise AlreadyActive(record.service, str(holder)) from error


class Lease:
    """The right to be the active one, for the TTL from each renewal. `Registry.beat` renews it."""

    def __init__(self, registry: Registry, key: str, record: LeaseRecord, revision: int) -> None:
        self._registry, self._key, self.record, self._revision = registry, key, record, revision
        self.renewed = _now()
        self.broken = False
        """It may have been somebody else's for a while; `Registry.assure` tells once."""

    async def renew(self) -> None:
        """Raises LeaseLost if another process has it now. One that merely ran out is taken again."""
        asked = _now()
        try:
            self._revision = await self._write(self._revision)
        except Conflict:
            self._revision = await self._settle()
        self._renewed(asked)

    async def _write(self, revision: int) -> int:
        kv, ttl_s = self._registry._kv, self._registry.ttl_s
        return await kv.update(self._key, wire.encode(self.record), revision, ttl_s=ttl_s)

    async def _settle(self) -> int:
        """The key is not as it was left: it ran out, or an earlier renewal was stored without an answer, or it is another's."""
        kv, ttl_s, holder = self._registry._kv, self._registry.ttl_s, "one process after the other"
        for _ in range(TRIES):
            held = await kv.get(self._key)
            try:
                if held is None:
                    return await kv.create(self._key, wire.encode(self.record), ttl_s=ttl_s)
                record = wire.decode(held[0], LeaseRecord)
                if record.token == self.record.token:
                    return await self._write(held[1])
            except (Conflict, KeyExists):
                continue
            holder = str(record)
            break
        self._forget()
        raise LeaseLost(self.record.service, holder)

    def _renewed(self, at: float) -> None:
        self.broken = self.broken or at - self.renewed >= self._registry.ttl_s
        self.renewed = at

    async def release(self) -> None:
        """Free it for the next one, if it is still held."""
        self._forget()
        held = await self._registry._kv.get(self._key)
        if held is not None and wire.decode(held[0], LeaseRecord).token == self.record.token:
            await self._registry._kv.delete(self._key)

    def _forget(self) -> None:
        if self._registry._leases.get(self.record.service) is self:
            del self._registry._leases[self.record.service]


def _now() -> float:
    """Seconds that also pass while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def process_start(pid: int) -> int:
    """When a process of this host started, in clock ticks since boot; 0 if there is none. Tells a reused pid from the old one."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def is_dead(holder: LeaseRecord) -> bool:
    """True only if this host can see that the holder's process is gone."""
    return holder.host == socket.gethostname() and process_start(holder.pid) != holder.pid_started


def _token(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_=-]", "_", name)
