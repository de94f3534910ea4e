"""The newest messages of many subjects in one request: JetStream's direct get with `multi_last`.

Guarantees: all that are there, or an error; a lost connection or a broker that restarts in the middle is asked again, up to the
deadline. Any node that has the stream may answer, so in a cluster what comes may be moments old: for looks, not for decisions.
tests/shared/test_kv.py.
"""

from __future__ import annotations

import asyncio
import json
import time

from shared.channel import ATTEMPT_S, RETRY_S, Lost, Request, status_of
from shared.errors import ApiError, RequestTimeout
from shared.jetstream import Connection
from shared.link import Frame

AT_ONCE = 512
"""The broker answers for at most 1,024."""
DONE, NONE, AWAY = "204", "404", "503"


class Answers(Request):
    """A waiter for many answers: the last one bears a status."""

    __slots__ = ("frames",)

    def __init__(self, subject: str) -> None:
        super().__init__(subject)
        self.frames: list[Frame] = []

    def answer(self, frame: Frame) -> None:
        if status_of(frame) is None:
            self.frames.append(frame)
        else:
            super().answer(frame)


async def newest(connection: Connection, stream: str, subjects: list[str], deadline_s: float) -> list[Frame]:
    """The newest message of each of these subjects that has one."""
    found: list[Frame] = []
    for first in range(0, len(subjects), AT_ONCE):
        found += await _ask(connection, stream, subjects[first : first + AT_ONCE], deadline_s)
    return found


async def _ask(connection: Connection, stream: str, subjects: list[str], deadline_s: float) -> list[Frame]:
    channel, subject, seen = connection.control, f"$JS.API.DIRECT.GET.{stream}", "not connected"
    payload, deadline = json.dumps({"multi_last": subjects}).encode(), time.monotonic() + deadline_s
    while (left := deadline - time.monotonic()) > 0 and await channel.wait_connected(left):
        answers = Answers(subject)
        reply = channel.expect(answers)
        try:
            if channel.send(subject, payload, reply):
                last = await answers.within(min(ATTEMPT_S, max(left, 0.01)))
                status = status_of(last) or ""
                if status in (DONE, NONE):
                    return answers.frames
                seen = f"{status}: {(last.headers or {}).get('Description', '')}"
                if status != AWAY:
                    raise ApiError(int(status), 0, seen, subject)
        except (TimeoutError, Lost):
            seen = "no answer"
        finally:
            channel.forget(reply)
        await asyncio.sleep(RETRY_S)
    raise RequestTimeout(connection.url, subject, deadline_s, seen)
