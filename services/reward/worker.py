"""A scoring process: `python -m services.reward.worker PARENT_PID`. Speaks length-prefixed msgpack on its pipes.

It calls one function at a time, on its main thread, where libraries that use alarms work; samples of an async function run
together in one event loop. It has no deadline of its own for sync functions: whoever waits kills it. What user code prints goes
to standard error, for standard output is the protocol. When the parent dies, the kernel ends it.

    <- {functions: [{path, options, field}], base}      -> {ready, needs, is_async} or {failed}
    <- {function, together, timeout_s, shared, samples}  -> {sample, score, kind, error} for each, as they are done
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import msgpack

from services.reward.scoring import FunctionError, Outcome, Scorer, load, score, score_async
from shared.parent import die_with_parent

LENGTH = struct.Struct("<I")

Send = Callable[[dict[str, Any]], None]


def main(parent: int) -> None:
    die_with_parent(parent)
    requests, answers = protocol_streams()

    def send(message: dict[str, Any]) -> None:
        payload = msgpack.packb(message)
        answers.write(LENGTH.pack(len(payload)) + payload)
        answers.flush()

    with asyncio.Runner() as runner:
        scorers = start(receive(requests), send)
        while scorers and (request := receive(requests)) is not None:
            serve(request, scorers[request["function"]], send, runner)


def protocol_streams() -> tuple[BinaryIO, BinaryIO]:
    """Standard input and output, taken away from user code."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, answers


def receive(requests: BinaryIO) -> dict[str, Any] | None:
    """The next message, or None when the parent closed the pipe."""
    head = requests.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return msgpack.unpackb(requests.read(LENGTH.unpack(head)[0]))


def start(hello: dict[str, Any] | None, send: Send) -> list[Scorer]:
    """Import the functions and say what they ask for. Nothing if one of them cannot be used."""
    if hello is None:
        return []
    try:
        scorers = [load(one["path"], one["options"], hello["base"], one["field"]) for one in hello["functions"]]
    except FunctionError as error:
        send({"failed": str(error)})
        return []
    except Exception as error:  # noqa: BLE001 - a user's module, while it is imported
        send({"failed": f"reward.functions: importing them raised {type(error).__name__}: {error}"})
        return []
    send({"ready": True, "needs": [one.needs for one in scorers], "is_async": [one.is_async for one in scorers]})
    return scorers


def serve(request: dict[str, Any], scorer: Scorer, send: Send, runner: asyncio.Runner) -> None:
    """Score the samples of one request."""
    samples = [(sample["sample"], request["shared"] | sample) for sample in request["samples"]]

    def tell(number: int, outcome: Outcome) -> None:
        send({"sample": number, "score": outcome.score, "kind": outcome.kind, "error": outcome.error})

    async def one(number: int, sample: dict[str, Any]) -> None:
        tell(number, await score_async(scorer, sample, request["timeout_s"]))

    async def together() -> None:
        await asyncio.gather(*(one(number, sample) for number, sample in samples))

    if scorer.is_async and request["together"]:
        runner.run(together())
        return
    for number, sample in samples:
        if scorer.is_async:
            runner.run(one(number, sample))
        else:
            tell(number, score(scorer, sample))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        main(int(sys.argv[1]))
