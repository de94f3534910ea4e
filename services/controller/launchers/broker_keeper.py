"""Keeps the private broker alive: started again on its store when it dies, and when it lives but greets nobody.

Gives up only when it cannot be started at all, or never stays up. tests/e2e/test_up.py kills and stops it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from services.controller.launchers.broker import PrivateBroker
from services.controller.launchers.telling import Teller
from shared.broker import BrokerError, StartFailed

log = logging.getLogger(__name__)

POLL_S = 0.25
STEADY_S = 10.0
"""A broker that served for so long is up; deaths before that count as one series."""
SERIES = 6
"""So many deaths in one series, and it is given up."""


async def keep_broker(broker: PrivateBroker, silent_s: float, teller: Teller, say: Callable[[str, str], None]) -> str:
    """Until it cannot go on: why. One that does not greet for `silent_s` is replaced."""
    deaths, up_since = 0, time.monotonic()
    while True:
        how = await _until_it_fails(broker, silent_s)
        died = time.monotonic()
        deaths = 1 if died - up_since > STEADY_S else deaths + 1
        if deaths >= SERIES:
            return f"the broker failed {deaths} times in a row soon after its start; see {broker.store}/nats-server.log"
        pid = broker.pid
        try:
            await asyncio.to_thread(broker.restart)
        except StartFailed as error:  # it died while it started; the next round counts that
            log.warning("%s", error)
            continue
        except BrokerError as error:
            return f"the broker {how} and cannot be started again: {error}"
        up_since = time.monotonic()
        down_s = up_since - died
        say(
            f"the broker {how}; started again on its store (pid {broker.pid}) after {down_s:.1f} s, nothing is lost",
            "yellow",
        )
        text = f"the private broker {how} and was started again"
        teller.tell("up", "up", "broker", text, cause=how, old_pid=pid, pid=broker.pid, down_s=round(down_s, 2))


async def _until_it_fails(broker: PrivateBroker, silent_s: float) -> str:
    """How it failed."""
    silent = 0.0
    looked = time.monotonic()
    while True:
        await asyncio.sleep(POLL_S)
        if not broker.running:
            return "died"
        serves = await asyncio.to_thread(broker.serves)
        now = time.monotonic()
        # A launcher that slept itself must not count its own sleep as the broker's silence.
        silent = 0.0 if serves else silent + min(now - looked, 4 * POLL_S + 1.0)
        looked = now
        if silent > silent_s:
            return f"lived without a word for {silent:.0f} s and was killed"
