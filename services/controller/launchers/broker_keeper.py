"""Watches the broker: whether it stores what is written, and, if it is the run's own, that it lives.

A private broker is started again on its store when it dies, when it lives but greets nobody, and when it greets but stores
nothing although there is room on its disk: nats-server does not recover by itself from a disk that was full. While the disk is
full the run waits, and says so once. Gives up only when the broker cannot be started at all or never stays up.
tests/e2e/test_up.py kills and stops it, tests/chaos/test_faults.py fills its disk.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable

from services.controller.launchers.broker import PrivateBroker
from services.controller.launchers.telling import Teller
from shared import awake
from shared.broker import LEAST_FREE_BYTES, BrokerError, DiskFull, StartFailed
from shared.registry import Registry

log = logging.getLogger(__name__)

POLL_S = 0.25
PROBE_EVERY_S = 1.0
PROBE_S = 3.0
DOUBT_S = 1.0
"""A probe that is not stored by then is taken for one that will not be, until it is."""
STEADY_S = 10.0
"""A broker that served for so long is up; deaths before that count as one series."""
SERIES = 6
"""So many deaths in one series, and it is given up."""


class BrokerKeeper:
    """`watch` for any broker, `keep` for the run's own."""

    def __init__(self, registry: Registry, silent_s: float, teller: Teller, say: Callable[[str, str], None]) -> None:
        self._registry, self._silent_s, self._teller, self._say = registry, silent_s, teller, say
        self._stored = True
        self._asked: float | None = None
        """When the probe began that is not answered yet."""
        self._unheard_s = 0.0
        self._full = False

    @property
    def stores(self) -> bool:
        """It stored what was written last, and does not take long over what is being written."""
        return self._stored and (self._asked is None or time.monotonic() - self._asked < DOUBT_S)

    async def watch(self) -> None:
        """See whether it stores, for ever."""
        with awake.clock() as now:
            looked = now()
            while True:
                self._asked = time.monotonic()
                self._stored = await self._registry.probe(PROBE_S)
                self._asked = None
                before, looked = looked, now()
                self._unheard_s = 0.0 if self._stored else self._unheard_s + looked - before
                await asyncio.sleep(PROBE_EVERY_S)

    async def keep(self, broker: PrivateBroker) -> str:
        """Keep it alive until it cannot go on: why."""
        deaths, up_since = 0, time.monotonic()
        while True:
            how = await self._until_it_fails(broker)
            died = time.monotonic()
            deaths = 1 if died - up_since > STEADY_S else deaths + 1
            if deaths >= SERIES:
                return f"the broker failed {deaths} times in a row soon after its start; see {broker.store}/nats-server.log"
            old_pid = broker.pid
            try:
                await asyncio.to_thread(broker.restart)
            except StartFailed as error:  # it died while it started; the next round counts that
                log.warning("%s", error)
                continue
            except DiskFull:
                self._tell_full(broker)
                deaths -= 1
                continue
            except BrokerError as error:
                return f"the broker {how} and cannot be started again: {error}"
            up_since, self._unheard_s, self._full = time.monotonic(), 0.0, False
            self._tell_restart(broker, how, old_pid, up_since - died)

    async def _until_it_fails(self, broker: PrivateBroker) -> str:
        """How it failed."""
        with awake.clock() as now:
            heard = now()
            while True:
                await asyncio.sleep(POLL_S)
                if not broker.running:
                    return "died"
                greets = await asyncio.to_thread(broker.serves)
                heard = now() if greets else heard
                if (silent_s := now() - heard) > self._silent_s:
                    return f"lived without a word for {silent_s:.0f} s"
                if greets and self._unheard_s > self._silent_s:
                    if shutil.disk_usage(broker.store).free >= LEAST_FREE_BYTES:
                        return f"stored nothing for {self._unheard_s:.0f} s"
                    self._tell_full(broker)

    def _tell_restart(self, broker: PrivateBroker, how: str, old_pid: int, down_s: float) -> None:
        self._say(f"the broker {how}; started again on its store (pid {broker.pid}), nothing is lost", "yellow")
        text = f"the private broker {how} and was started again"
        self._teller.tell(
            "up", "up", "broker", text, cause=how, old_pid=old_pid, pid=broker.pid, down_s=round(down_s, 2)
        )

    def _tell_full(self, broker: PrivateBroker) -> None:
        """Once."""
        if self._full:
            return
        self._full = True
        free = shutil.disk_usage(broker.store).free
        text = f"the disk of the broker is full ({free} bytes free at {broker.store}, {LEAST_FREE_BYTES} are needed)"
        self._say(f"{text}; the run waits until there is room", "red")
        self._teller.tell("up", "up", "disk_full", text, free=free)
