"""How a call for weights gets from SGLang's HTTP process to its schedulers and back, while these go on generating.

    HTTP process: call(path, body) --> ticket --> poll, poll, ... --> answer
    each scheduler: the call runs on a loop in a thread of its own; what has to happen between two steps waits for the next poll

Messages travel as SGLang's own CheckWeights request, the one control message that reaches every rank, takes no lock and waits for
nobody. A poll is handled by all ranks at the same step, and they tell each other how far they are: a function for the scheduler's
thread runs when all ranks have it, and a call is over when it is over on all. If one rank fails, so does the call.
tests/contract/test_updates.py, on the real server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from services.rollout.engines.fields import BadRequest
from services.rollout.engines.receiving import UpdateError
from services.rollout.engines.sglang.target import LoadedOtherWeights, SglangTarget
from services.rollout.engines.sglang.updates import Weights
from services.rollout.engines.update_routes import UpdateRoutes, refusal

log = logging.getLogger(__name__)

ACTION = "slipstream"
"""Of a CheckWeights request that is one of ours. Its text is the first entry of `skip_tensor_list`."""
POLL_S = (0.002, 0.02)
"""Shortest and longest pause between two polls."""
RUNNING, WAITING, FAILED, DONE = "running", "waiting", "failed", "done"

Answer = tuple[int, dict[str, Any]]


class Bridge:
    """The scheduler's end."""

    def __init__(self, manager: Any) -> None:
        self._group = manager.tp_cpu_group
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="slipstream-weights", daemon=True).start()
        self._mail: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._calls: dict[int, Future[Answer]] = {}
        self._tickets = itertools.count(1)
        weights = Weights(SglangTarget(manager, self._in_scheduler))
        self._routes = UpdateRoutes(weights, _abort_elsewhere, lambda: weights.served)

    def handle(self, text: str) -> str:
        """In the scheduler's thread, on every rank: start a call, or look after it."""
        message = json.loads(text)
        if "path" in message:
            ticket = next(self._tickets)
            call = self._call(message["path"], message["body"])
            self._calls[ticket] = asyncio.run_coroutine_threadsafe(call, self._loop)
            return json.dumps({"ticket": ticket})
        return json.dumps(self._poll(int(message["ticket"])))

    async def _call(self, path: str, body: Any) -> Answer:
        try:
            return 200, await self._routes.routes[path](body)
        except (BadRequest, UpdateError) as error:
            return 400, refusal(error)
        except Exception as error:
            log.exception("%s failed", path)
            return 500, refusal(error)

    async def _in_scheduler(self, function: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._mail.append((function, future))
        return await asyncio.wrap_future(future)

    def _poll(self, ticket: int) -> dict[str, Any]:
        states = self._gather(self._state(ticket))
        if all(state == WAITING for state in states):
            self._run_mail()
        elif WAITING in states and (FAILED in states or DONE in states):
            self._refuse_mail()
        if not all(state in (FAILED, DONE) for state in states):
            return {"done": False}
        answers = self._gather(self._calls.pop(ticket).result())
        status, answer = next((answer for answer in answers if answer[0] != 200), answers[0])
        return {"done": True, "status": status, "answer": answer}

    def _state(self, ticket: int) -> str:
        call = self._calls[ticket]
        if call.done():
            return DONE if call.result()[0] == 200 else FAILED
        return WAITING if self._mail else RUNNING

    def _gather(self, mine: Any) -> list[Any]:
        size = dist.get_world_size(self._group)
        if size == 1:
            return [mine]
        all_of_them: list[Any] = [None] * size
        dist.all_gather_object(all_of_them, mine, group=self._group)
        return all_of_them

    def _run_mail(self) -> None:
        """What a function raises beside UpdateError ends the engine: nobody knows then what the model holds."""
        function, future = self._mail.popleft()
        refused: UpdateError | None = None
        result = None
        try:
            result = function()
        except UpdateError as error:
            refused = error
        if len(set(self._gather(refused is None))) > 1:
            raise LoadedOtherWeights("some ranks took the update and others did not")
        if refused is not None:
            future.set_exception(refused)
        else:
            future.set_result(result)

    def _refuse_mail(self) -> None:
        while self._mail:
            self._mail.popleft()[1].set_exception(UpdateError("another rank of this engine could not take the update"))


async def _abort_elsewhere() -> None:
    raise BadRequest("abort_all_requests: send /abort_request first")


_bridge: Bridge | None = None


def check_weights(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Around SchedulerWeightUpdaterManager.check_weights. What is not caught ends the engine, as it should."""
    global _bridge
    if request.action != ACTION:
        return original(manager, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    try:
        if _bridge is None:
            _bridge = Bridge(manager)
        return CheckWeightsReqOutput(success=True, message=_bridge.handle(request.skip_tensor_list[0]))
    except UpdateError as error:
        return CheckWeightsReqOutput(success=False, message=str(error))


class Caller:
    """The HTTP process's end. `send(text)` is one exchange with the schedulers: (success, text)."""

    def __init__(self, send: Callable[[str], Any]) -> None:
        self._send = send

    async def call(self, path: str, body: Any) -> Answer:
        """(HTTP status, answer). Runs to its end even if whoever asked has gone: the schedulers do, too."""
        return await asyncio.shield(asyncio.ensure_future(self._call(path, body)))

    async def _call(self, path: str, body: Any) -> Answer:
        started, text = await self._send(json.dumps({"path": path, "body": body}))
        if not started:
            return 400, refusal(UpdateError(text))
        ticket, pause_s = json.loads(text)["ticket"], POLL_S[0]
        while True:
            told, text = await self._send(json.dumps({"ticket": ticket}))
            if not told:
                return 400, refusal(UpdateError(text))
            state = json.loads(text)
            if state["done"]:
                return int(state["status"]), state["answer"]
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S[1])
