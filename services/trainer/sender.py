"""Sends a copy of weights: makes it, writes its files of the snapshot, and is rank 0 of the group in which it is broadcast.

A version has one sender, in the trainer's leader; or one in the head of each pipeline stage, of the tensors of that stage. A
`Sender` lives where its tensors are. The publisher (weights.py) has a `SenderHandle` of each, whose calls run in a thread of
their own, one after another: building process groups is not thread-safe. They are plain messages, so that it makes no
difference whether the sender is in this process or in another rank (stage.py). Every call has a deadline; a broadcast that
failed is answered with its cause, and its group is left. tests/dcs/test_publisher.py, tests/dcs/test_stages.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.dcs import collective
from services.dcs.collective import CollectiveError
from services.dcs.snapshots import FileEntry
from services.dcs.state import Meeting
from services.dcs.versions import JOIN_S
from services.trainer.snapshot_files import Shards, write_shards
from services.trainer.weight_copy import Copier, Copy, Outline
from shared.network import own_address
from shared.timing import timed

SENDING_GRACE_S = 30.0
"""How long after a broadcast's deadline its sender still may answer."""
LEAVE_S = 30.0
"""What leaving a group may take: a call that is stuck in it ends first."""

Ask = Callable[[dict[str, Any], float], Any]
"""Have a sender do an order, within so many seconds."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The process group of an epoch, and the store over which it met."""

    epoch: int
    group: dist.ProcessGroup
    store: dist.TCPStore | None


class Sender:
    """The side that holds the copy. After `copy`, one thread at a time."""

    def __init__(self, copier: Copier, timeout_s: float) -> None:
        self._copier, self._timeout_s = copier, timeout_s
        self.held: Copy | None = None
        """What was copied last."""
        self._joined: Joined | None = None
        self._spare: dist.TCPStore | None = None
        """Where the next group will meet."""

    def copy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Outline:
        """Take over tensors, in place of the last ones. Raises SegmentError."""
        self.held = self._copier.copy(tensors)
        return self.held.outline

    def handle(self, order: dict[str, Any]) -> Any:
        """What a `SenderHandle` asks for, as a plain message."""
        known: dict[str, Callable[..., Any]] = {
            "outline": self._outline,
            "write": self._write,
            "meet": self._meet,
            "send": self._send,
            "leave": self._leave,
        }
        return known[order["do"]](**{name: value for name, value in order.items() if name != "do"})

    def _outline(self) -> dict[str, Any]:
        return self._copy().outline.plain()

    def _write(self, folder: str, shards: Shards) -> list[Any]:
        return [list(astuple(entry)) for entry in write_shards(self._copy(), Path(folder), shards)]

    def _meet(self, towards: str) -> list[Any]:
        if self._spare is None:
            self._spare = collective.host_store(self._timeout_s)
        return [own_address(towards), self._spare.port]

    def _send(self, group: dict[str, Any], number: int) -> dict[str, Any]:
        failure, seconds = "", dict[str, float]()
        deadline = time.monotonic() + group["timeout_s"]
        try:
            with timed(seconds, "join_s"):
                joined = self._join(group, number, deadline)
            with timed(seconds, "broadcast_s"):
                for bucket in self._copy().buckets:
                    data = bucket.data.cuda() if group["backend"] == "nccl" else bucket.data
                    collective.broadcast(joined, data, deadline)
        except CollectiveError as error:
            failure = str(error)
        # Only now that the error and its frames are gone does leaving close the sockets, on which the living members wait.
        if failure:
            self._leave()
        return {"error": failure, "seconds": seconds}

    def _leave(self) -> None:
        joined, self._joined = self._joined, None
        if joined is not None:
            collective.leave(joined.group)

    def _join(self, group: dict[str, Any], number: int, deadline: float) -> dist.ProcessGroup:
        if self._joined is None or self._joined.epoch != group["epoch"]:
            store, self._spare = self._spare, None
            self._leave()
            own = group["senders"][number]
            limit = max(0.1, min(JOIN_S, deadline - time.monotonic()))
            joined = collective.join(
                own["host"], own["port"], group["world_size"], 0, own["name"], group["backend"], limit, store
            )
            self._joined = Joined(group["epoch"], joined, store)
        return self._joined.group

    def _copy(self) -> Copy:
        assert self.held is not None
        return self.held


@dataclass(frozen=True, slots=True)
class Sent:
    """How a broadcast went. `error`: why it failed."""

    error: str
    seconds: dict[str, float]


class SenderHandle:
    """A sender as the publisher works with it. `timeout_s`: for everything but the broadcast."""

    def __init__(self, ask: Ask, timeout_s: float) -> None:
        self._ask, self._timeout_s = ask, timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights-sender")

    async def outline(self) -> Outline:
        """Of its copy."""
        return Outline.of(await self._do("outline"))

    async def write(self, folder: Path, shards: Shards) -> list[FileEntry]:
        """Its files of a snapshot. Raises OSError."""
        return [FileEntry(*entry) for entry in await self._do("write", folder=str(folder), shards=shards)]

    async def meet(self, towards: str) -> Meeting:
        """Where its next group would meet, as seen from the host `towards`."""
        return Meeting(*await self._do("meet", towards=towards))

    async def send(self, group: dict[str, Any], number: int) -> Sent:
        """Broadcast the copy as sender `number` of the group, and join that first if it is a new one."""
        limit = group["timeout_s"] + SENDING_GRACE_S
        return Sent(**await self._do("send", limit, group=group, number=number))

    async def leave(self) -> None:
        """Give the group up, if there is one."""
        await self._do("leave", LEAVE_S)

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    async def _do(self, what: str, timeout_s: float = 0.0, **arguments: Any) -> Any:
        order, limit = {"do": what, **arguments}, timeout_s or self._timeout_s
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, order, limit)
