"""Reward functions of every kind that a user may write, and some that nobody should."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np


def right(completion: str, answer: Any) -> bool:
    return completion == answer


PRESENT: list[str] = []


async def meets(completion: str, completions: list[str]) -> float:
    """Waits until all samples of the group are in here."""
    PRESENT.append(completion)
    while len(PRESENT) < len(completions):  # noqa: ASYNC110 - no event is shared before there is a loop
        await asyncio.sleep(0.01)
    return float(completion)


def everything(prompt: str, completion: str, answer: Any, **context: Any) -> float:
    return float(len(context))


def sees(
    finish: str, meta: dict[str, Any], completion_ids: list[int], prompt_ids: list[int], index: int, bonus: float
) -> float:
    return bonus + meta["level"] + len(completion_ids) + 10 * len(prompt_ids) + 100 * index + 1000 * (finish == "stop")


def waits(completion: str) -> bool:
    """For a file that somebody makes, after making one."""
    Path(f"{completion}.asked").touch()
    while not Path(completion).exists():
        time.sleep(0.01)
    return True


def acts(completion: str) -> Any:
    """Does what the completion says."""
    if completion.startswith("sleep"):
        time.sleep(600)
    if completion.startswith("spin"):
        while True:
            pass
    if completion == "raise":
        raise ValueError("no good \ud83d")
    if completion == "exit":
        raise SystemExit(3)
    if completion == "die":
        os._exit(7)
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "print":
        print("printed to standard output", flush=True)
        os.write(1, b"\x00\x00\x00\x00written to it")
        return 1
    values = {"nan": math.nan, "inf": -math.inf, "huge": 10**400, "big": 1e300, "none": None, "text": "1.0"}
    values |= {"bool": np.bool_(True), "numpy": np.float32(0.5), "int": 2, "list": [1.0]}
    return values[completion]


async def acts_async(completion: str) -> Any:
    if completion == "wait":
        await asyncio.sleep(600)
    if completion == "own":
        raise TimeoutError
    if completion == "fine":
        await asyncio.sleep(0.05)
        return 1
    return acts(completion)


def dies_once(completion: str, meta: dict[str, Any]) -> float:
    """Ends its process, but only the first time."""
    mark = Path(meta["folder"]) / completion
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def pid(completion: str) -> float:
    time.sleep(0.02)
    return float(os.getpid())


def wants_more(completion: str, tools: list[str]) -> float:
    return 0.0


def by_options(completion: str, options: dict[str, Any]) -> float:
    return float(options["bonus"])


def patient(completion: str, answer: Any) -> float:
    """math-verify, with as much time as it needs."""
    from services.reward.rewards import math_verify

    math_verify.SECONDS = 300
    return math_verify.score(completion, answer)


LEAK: list[np.ndarray] = []


def leaks(completion: str, mb: int) -> float:
    """Every call keeps some memory; `bloat` keeps a gigabyte, and does not end."""
    LEAK.append(np.ones(mb << 17))
    while completion == "bloat":
        if len(LEAK) < 64:
            LEAK.append(np.ones(16 << 17))
        time.sleep(0.02)
    return 1.0
