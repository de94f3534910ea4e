"""Between the trainer's leader and the head of another pipeline stage: orders for its `Sender`, while training goes on.

The ranks' channel (channel.py) carries training's orders, which all ranks do at the same time. Weights are written and sent
beside that, so this is a way of its own: a store that the head serves, in which the leader sets an order and the head its
answer. The tensors come to the heads in step with the leader's own (`RankedPolicy.outgoing`). Whoever cannot be reached, or
does not answer in time, is `StageLost`. tests/dcs/test_stages.py.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from services.dcs import collective
from services.trainer.messages import decode, encode
from services.trainer.sender import Sender, SenderHandle
from shared.errors import first_line
from shared.service import ServiceFailed

log = logging.getLogger(__name__)

CONNECT_S = 30.0
IDLE = timedelta(hours=1)
"""A head without an order begins to wait anew after this."""


class StageLost(ServiceFailed):
    """The head of a stage is gone, hangs, or could not do what was asked."""


class StageServer:
    """In the head: a thread that does what the leader asks of the sender, until the process ends."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self._store = collective.host_store(CONNECT_S)
        self.port = self._store.port
        # The current device is each thread's own.
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        threading.Thread(target=self._serve, name="weights-stage", daemon=True).start()

    def _serve(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        for number in itertools.count(1):
            self._store.set(_answer(number), encode(self._do(self._next(number))))  # type: ignore[arg-type]

    def _next(self, number: int) -> dict[str, Any]:
        key = _order(number)
        while True:
            try:
                self._store.wait([key], IDLE)
            except dist.DistStoreError:
                continue  # nothing yet
            order = decode(self._store.get(key))
            self._store.delete_key(key)
            return dict(order)

    def _do(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"value": self.sender.handle(order), "error": ""}
        except Exception as error:  # the leader has it then, and decides
            log.exception("%s", order["do"])
            return {"value": None, "error": f"{type(error).__name__}: {error}"}


@dataclass(frozen=True, slots=True)
class StageAddress:
    """Where the head of a stage takes orders."""

    rank: int
    host: str
    port: int

    def handle(self, timeout_s: float) -> SenderHandle:
        """Leader: a way to it. Raises StageLost."""
        return SenderHandle(_Orders(self).ask, timeout_s)


class _Orders:
    """The leader's end."""

    def __init__(self, address: StageAddress) -> None:
        self._rank, self._numbers = address.rank, itertools.count(1)
        try:
            self._store = dist.TCPStore(
                address.host,
                address.port,
                is_master=False,
                timeout=timedelta(seconds=CONNECT_S),
                wait_for_workers=False,
            )
        except (dist.DistError, RuntimeError) as error:
            raise StageLost(f"rank {address.rank}, head of its pipeline stage: {first_line(error)}") from error

    def ask(self, order: dict[str, Any], timeout_s: float) -> Any:
        number, started = next(self._numbers), time.monotonic()
        try:
            self._store.set(_order(number), encode(order))  # type: ignore[arg-type]
            self._store.wait([_answer(number)], timedelta(seconds=timeout_s))
            answer = decode(self._store.get(_answer(number)))
            self._store.delete_key(_answer(number))
        except (dist.DistError, RuntimeError) as error:
            took = time.monotonic() - started
            raise StageLost(
                f"rank {self._rank}, head of its pipeline stage, does not answer to {order['do']!r} after {took:.0f} s: it is "
                f"gone or hangs ({first_line(error)}); start the trainer again"
            ) from error
        if answer["error"]:
            raise StageLost(f"rank {self._rank}, head of its pipeline stage: {order['do']}: {answer['error']}")
        return answer["value"]


def _order(number: int) -> str:
    return f"order/{number}"


def _answer(number: int) -> str:
    return f"answer/{number}"
