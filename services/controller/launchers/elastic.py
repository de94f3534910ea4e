"""A launcher's side of scale operations: what the run's record wants is started, what it does not want is let go.

Level-triggered: the record (shared/wanted.py) is read twice a second and compared with what is there, so that a message lost or a
launcher started anew changes nothing. Tells in the registry that a launcher is there, and which replicas it will not start again:
those that left by themselves, and newcomers of a scale operation that cannot run, which fail that operation and not the run.
tests/controller/test_elastic.py.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable

from services.controller.attach import Run
from services.controller.launchers.launcher import Launcher
from services.controller.launchers.supervision import Supervisor
from shared import columns, wanted
from shared.config import RunConfig
from shared.errors import TransportError
from shared.wanted import SCALABLE, Wanted

log = logging.getLogger(__name__)

LOOK_S = 0.5
TELL_S = 2.0


class Elastic:
    """Keeps the scalable replicas of one launcher as the record wants them. `start(replica, service)` starts one."""

    def __init__(
        self,
        run: Run,
        launcher: Launcher,
        supervisor: Supervisor,
        start: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self.run, self.launcher, self.supervisor, self._start = run, launcher, supervisor, start
        self.gone: dict[str, str] = {}
        self._wanted = Wanted()
        self._released: set[str] = set()
        self._told, self._told_gone = 0.0, dict[str, str]()

    async def first(self, config: RunConfig) -> list[tuple[str, str]]:
        """(service, replica) of the scalable ones to start the run with."""
        self._wanted = await wanted.change(self.run.kv, lambda record: for_run(record, config))
        return [(spec["service"], name) for name, spec in self._wanted.replicas.items()]

    async def follow(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                record = wanted.load(await self.run.kv.get(wanted.KEY))
                await self._tell()
            except TransportError as error:
                log.debug("what is wanted cannot be read: %s", error)
                continue
            await self.reconcile(record)

    async def reconcile(self, record: Wanted) -> None:
        """Let go what is not wanted, start what is."""
        self._wanted = record
        watched = self.supervisor.watched
        for name in [name for name, one in watched.items() if one.service in SCALABLE and name not in record.replicas]:
            if name not in self._released:
                self._released.add(name)
                if self.supervisor.release(name):
                    self.launcher.terminate(name)
            elif name in record.killed:
                self.launcher.kill(name)
        for name, spec in record.replicas.items():
            one = watched.get(name)
            if one is None or (name in self._released and one.phase == "left"):
                self._released.discard(name)
                await self._start(name, spec["service"])
        self.gone = {name: why for name, why in self.gone.items() if name in record.replicas}

    def gives_up(self, replica: str, why: str) -> bool:
        """Whether this replica may be done without: it came by a scale operation, which fails with it."""
        if not self._wanted.replicas.get(replica, {}).get("by"):
            return False
        self.left(replica, why)
        return True

    def left(self, replica: str, why: str) -> None:
        """It is gone for good."""
        self.supervisor.left(replica)
        if replica in self._wanted.replicas and replica not in self._released:
            self.gone[replica] = why

    async def _tell(self) -> None:
        if time.monotonic() - self._told < TELL_S and self.gone == self._told_gone:
            return
        name = f"{self.launcher.kind}-{socket.gethostname()}"
        await self.run.registry.present(wanted.Launcher(name, self.launcher.kind, dict(self.gone)))
        self._told, self._told_gone = time.monotonic(), dict(self.gone)


def for_run(record: Wanted, config: RunConfig) -> Wanted:
    """The record at the start of a run. A role is as it was scaled before, unless the run file says another number now."""
    counts = {
        "reward": config.reward.replicas,
        "rollout": config.rollout.replicas,
        **{role: config.replicas_of(role) for role in columns.stages(config) if role in SCALABLE},
    }
    replicas: dict[str, dict[str, str]] = {}
    for role, count in counts.items():
        names = record.of(role)
        if record.counts.get(role) == count and names:
            replicas |= {name: record.replicas[name] for name in names}
        else:
            replicas |= {f"{role}-{n}": {"service": role, "by": "", "engine_url": ""} for n in range(count)}
    return Wanted(replicas, counts=counts)
