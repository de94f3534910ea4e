"""Runs at the start of every process of a system under test that has this folder on its PYTHONPATH, and spoils it as told.

    TEST_CLOCKS=FOLDER              `time.time` goes wrong by the seconds in FOLDER/<part>, as soon as that file is there
    TEST_KILLS_ENGINE=GROUP         the engine dies over that group
    TEST_KILLS_ROLLOUT=GROUP        the rollout service dies over that group
    TEST_BREAKS_ROLLOUT=GROUP       it meets an error that nobody thought of

A part is the service's name, `up`, or `engine`.
"""

import os
import signal
import sys
import time


def part() -> str:
    words = sys.orig_argv
    if any("engines.light" in word for word in words):
        return "engine"
    return words[words.index("serve") + 1] if "serve" in words else "up"


def spoil_clock(file: str) -> None:
    right = time.time

    def wrong() -> float:
        try:
            with open(file) as offset:
                return right() + float(offset.read())
        except (OSError, ValueError):
            return right()

    time.time = wrong


def spoil_engine(group: str) -> None:
    from services.rollout.engines.light.server import Server

    generate = Server.generate

    async def dies(self, request):
        if (await request.json())["rid"].startswith(f"{group}/"):
            os.kill(os.getpid(), signal.SIGKILL)
        return await generate(self, request)

    Server.generate = dies


def spoil_rollout(kills: str | None, breaks: str | None) -> None:
    from services.rollout.draw import Drawer

    draw = Drawer.draw

    async def dies(self, group, *rest):
        if group.id == kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if group.id == breaks:
            raise ZeroDivisionError("nobody thought of this")
        return await draw(self, group, *rest)

    Drawer.draw = dies


if "TEST_CLOCKS" in os.environ:
    spoil_clock(os.path.join(os.environ["TEST_CLOCKS"], part()))
if part() == "engine" and "TEST_KILLS_ENGINE" in os.environ:
    spoil_engine(os.environ["TEST_KILLS_ENGINE"])
if part() == "rollout" and {"TEST_KILLS_ROLLOUT", "TEST_BREAKS_ROLLOUT"} & set(os.environ):
    spoil_rollout(os.environ.get("TEST_KILLS_ROLLOUT"), os.environ.get("TEST_BREAKS_ROLLOUT"))
