"""The head of a pipeline stage without a model: a sender in a process of its own, which may be killed or stopped."""

from __future__ import annotations

from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch

from services.trainer.sender import Sender
from services.trainer.stage import StageAddress, StageServer
from services.trainer.weight_copy import Copier
from tests.dcs.fake_engine import PROCESSES

ANSWER_S = 300.0


class StageProcess:
    """`copy(tensors)` is what the ranks do in step; everything else goes by `address`."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self._calls, theirs = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_serve, args=(timeout_s, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.address = StageAddress(rank, "127.0.0.1", self._answer())

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def copy(self, tensors: dict[str, torch.Tensor]) -> None:
        self._calls.send({name: (str(t.dtype), list(t.shape), t.flatten().tolist()) for name, t in tensors.items()})
        self._answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def _answer(self) -> Any:
        if not self._calls.poll(ANSWER_S):
            raise TimeoutError(f"the stage gave no answer within {ANSWER_S:.0f} s")
        return self._calls.recv()


def _serve(timeout_s: float, calls: Pipe) -> None:
    torch.set_num_threads(1)
    server = StageServer(Sender(Copier(1 << 20), timeout_s))
    calls.send(server.port)
    while True:
        told = calls.recv()
        tensors = {
            name: torch.tensor(values, dtype=getattr(torch, dtype.removeprefix("torch."))).reshape(shape)
            for name, (dtype, shape, values) in told.items()
        }
        server.sender.copy(tensors.items())
        calls.send(None)
