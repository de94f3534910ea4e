"""Finds an engine that hangs: its process lives, so no connection breaks, and every request would wait for its whole deadline.

Only time counts in which the watcher itself was awake (shared/awake.py): a replica that stood still does not blame its engine.
tests/chaos/test_faults.py stops an engine with SIGSTOP; tests/rollout/test_engine_watch.py stops the watcher, and has servers
that answer nothing or no steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

from services.rollout.engines.client import EngineClient, EngineDead
from shared import awake

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
    with awake.clock() as now:
        async with EngineClient(url, timeout_s=ANSWER_S) as engine:
            heard = stepped = now()
            while True:
                await asyncio.sleep(PROBE_S)
                answers = await engine.answers()
                if answers:
                    heard = now()
                    if asleep():
                        stepped = heard
                    elif await engine.steps(STEP_S):
                        heard = stepped = now()
                if (silence := now() - heard) > silent_s and not answers:
                    raise EngineDead(504, f"the engine at {url} hangs: no answer for {silence:.0f} s")
                if (standstill := now() - stepped) > stuck_s:
                    raise EngineDead(503, f"the engine at {url} hangs: no step for {standstill:.0f} s")
