"""Finds an engine that hangs: its process lives, so no connection breaks, and every request would wait for its whole deadline.

tests/chaos/test_faults.py stops one with SIGSTOP, tests/rollout/test_engine_watch.py has servers that answer nothing or no steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn

from services.rollout.engines.client import EngineClient, EngineDead

PROBE_S = 2.0
ANSWER_S = 5.0
"""What any answer may take."""
STEP_S = 30.0
"""What the answer that it makes steps may take: an engine waits for its next step with it."""


async def until_hung(
    url: str, *, silent_s: float, stuck_s: float, asleep: Callable[[], bool] = lambda: False
) -> NoReturn:
    """Raises EngineDead when the engine has answered nothing for `silent_s`, or has made no step for `stuck_s` while not
    `asleep`."""
    async with EngineClient(url, timeout_s=ANSWER_S) as engine:
        heard = stepped = time.monotonic()
        while True:
            await asyncio.sleep(PROBE_S)
            answers = await engine.answers()
            if answers:
                heard = time.monotonic()
                if asleep():
                    stepped = heard
                elif await engine.steps(STEP_S):
                    heard = stepped = time.monotonic()
            if (silence := time.monotonic() - heard) > silent_s and not answers:
                raise EngineDead(504, f"the engine at {url} hangs: no answer for {silence:.0f} s")
            if (standstill := time.monotonic() - stepped) > stuck_s:
                raise EngineDead(503, f"the engine at {url} hangs: no step for {standstill:.0f} s")
