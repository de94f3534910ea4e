"""Between the trainer's ranks: how they find each other, orders from the leader, answers of all, and who is missed.

Ranks come from torchrun, which sets RANK and WORLD_SIZE on every one, or the leader starts them itself on its own machine. An
order is announced in the ranks' store, where followers may wait for hours, and carried by a broadcast, for which all are awake.
Every exchange has the deadline `trainer.rank_timeout_s`; whoever dies or hangs is missed by all others (`RankLost`), and ranks
that the leader has started die with it. tests/trainer/layouts/test_ranks.py.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.megatron.groups import init_distributed
from services.trainer.messages import decode, encode
from shared.config import ConfigError, RunConfig

log = logging.getLogger(__name__)

IDLE = timedelta(hours=1)
"""A rank without an order begins to wait anew after this. That the leader is gone it notices at once."""
READY_POLL_S = 0.05

START_S = 300.0
"""What ranks may take to start."""
ENDING_S = 3.0
"""How long after its connections closed a dead rank may still look alive."""
LEAVE, FORM = "leave", "form"
LEADER_PID = "SLIPSTREAM_LEADER_PID"
"""Environment variable of a rank that the leader started."""
LEAVE_S = 20.0
"""What a dismissed rank may take to end."""


class RankLost(RuntimeError):
    """A rank is dead, hangs, or cannot be reached."""


@dataclass(slots=True)
class Gathering:
    """Ranks on their way: the store where they meet, and those that this process has started."""

    store: dist.Store
    ranks: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def form(self, form: dict[str, Any], device: str, timeout_s: float) -> Channel:
        """Leader: tell all what to be, wait until they are there, and make the group of all."""
        self.store.set(FORM, encode({**form, "timeout_s": timeout_s}))  # type: ignore[arg-type]
        deadline = time.monotonic() + START_S
        for rank in range(1, self.ranks):
            while not self.store.check([f"ready/{rank}"]):
                ended = [process.poll() for process in self.processes]
                if any(code is not None for code in ended):
                    raise RankLost(
                        f"a rank ended with exit code {max(c for c in ended if c is not None)} while starting"
                    )
                if time.monotonic() > deadline:
                    raise RankLost(f"rank {rank} of {self.ranks} is not there after {START_S:.0f} s; see its log")
                time.sleep(READY_POLL_S)
        init_distributed(device, timeout_s, dist.PrefixStore("group", self.store), 0, self.ranks)
        return Channel(self.store, 0, self.ranks, timeout_s, self.processes)


def gather(config: RunConfig) -> Gathering | None:
    """Leader: where the ranks of this run meet; None if there is one. Starts them unless torchrun has.

    Call it in the main thread: ranks that are started here die with the thread that started them.
    """
    ranks, world = config.trainer.ranks, int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and world != ranks:
        raise ConfigError(f"trainer.ranks: {ranks}, but torchrun has started {world}; give both the same number")
    if world > 1:
        return Gathering(_torchrun_store(leader=True), ranks)
    if ranks == 1:
        return None
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(served.port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "services.trainer.follower"],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **common, "RANK": str(n), "LOCAL_RANK": str(n), LEADER_PID: str(os.getpid())},
        )
        for n in range(1, ranks)
    ]
    return Gathering(_own(served), ranks, processes)


def meet() -> tuple[dict[str, Any], Channel]:
    """Other ranks: what the leader wants them to be, and the way to it. Waits for the leader, however long it takes."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _torchrun_store(leader=False)
    store.set(f"ready/{rank}", "")
    _wait(store, FORM, rank)
    form = decode(store.get(FORM))
    init_distributed(form["device"], form["timeout_s"], dist.PrefixStore("group", store), rank, ranks)
    return form, Channel(store, rank, ranks, form["timeout_s"])


def _torchrun_store(leader: bool) -> dist.Store:
    """The store at MASTER_ADDR, which torchrun's agent serves, or the leader if it does not."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=leader and not served, wait_for_workers=False)
    return _own(store)


def _own(store: dist.Store) -> dist.Store:
    """Keys of these ranks, and of this attempt of torchrun's, do not meet any others."""
    return dist.PrefixStore(f"slipstream/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _wait(store: dist.Store, key: str, rank: int) -> None:
    """Until the key is there. RankLost when nobody serves the store any more."""
    while True:
        try:
            store.wait([key], IDLE)
            return
        except dist.DistNetworkError as error:
            raise RankLost(f"rank {rank}: the leader is gone ({error})") from error
        except dist.DistStoreError:
            continue  # nothing yet


@dataclass(slots=True)
class Channel:
    """Orders from the leader through the ranks' store, with their arguments in one broadcast; answers gathered from all."""

    store: dist.Store
    rank: int
    world: int
    timeout_s: float
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Ranks that this process started."""
    lost: bool = False
    """The ranks are no longer at the same place: nothing more can be asked of them."""
    _number: int = 0

    def order(self, message: Any) -> None:
        """Leader: have all ranks take this order."""
        if self.lost:
            raise RankLost("the ranks have parted; start the trainer again")
        payload = encode(message)
        self._number += 1
        with self.watched():
            self.store.set(_key(self._number), str(len(payload)))
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0)

    def next(self) -> Any:
        """Other ranks: the next order, whenever it comes."""
        self._number += 1
        _wait(self.store, _key(self._number), self.rank)
        with self.watched():
            payload = torch.empty(int(self.store.get(_key(self._number))), dtype=torch.uint8)
            dist.broadcast(payload, src=0)
        return decode(payload.numpy().tobytes())

    def exchange(self, message: Any) -> list[Any]:
        """All ranks' messages, on all ranks."""
        payload = encode(message)
        with self.watched():
            sizes = torch.zeros(self.world, dtype=torch.int64)
            sizes[self.rank] = len(payload)
            dist.all_reduce(sizes)
            longest = int(sizes.max())
            mine = torch.zeros(longest, dtype=torch.uint8)
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            parts = [torch.empty_like(mine) for _ in range(self.world)]
            dist.all_gather(parts, mine)
        if self.rank == 0:
            self.store.delete_key(_key(self._number))
        return [decode(part[:size].numpy().tobytes()) for part, size in zip(parts, sizes.tolist(), strict=True)]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Failures of the connections between ranks become RankLost."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankLost) or not lost_connection(error):
                raise
            raise RankLost(self.explain(error)) from error

    @contextmanager
    def in_step(self, *harmless: type[Exception]) -> Iterator[None]:
        """Notes that the ranks have parted if anything but a harmless error or an early end comes out."""
        try:
            with self.watched():
                yield
        except BaseException as error:
            self.lost = not isinstance(error, (GeneratorExit, *harmless))
            raise

    def dismiss(self) -> None:
        """Leader: let the other ranks end. Those of this machine that do not are killed."""
        try:
            if not self.lost:
                self.order({"do": LEAVE})
                for process in self.processes:
                    process.wait(LEAVE_S)
        except (RankLost, subprocess.TimeoutExpired) as error:
            log.warning("ranks that did not leave by themselves are ended: %s", error)
        self.abandon()

    def abandon(self) -> None:
        """Leader: end the ranks that this process started and that are left, whatever they are doing."""
        for process in self.processes:
            process.kill()
            process.wait()

    def explain(self, error: Exception) -> str:
        """The sockets of a process that dies close before it can be waited for, so that is given a moment."""
        deadline = time.monotonic() + ENDING_S
        while all(process.poll() is None for process in self.processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        ended = [
            f"rank {rank} ended with exit code {process.returncode}"
            for rank, process in enumerate(self.processes, start=1)
            if process.poll() is not None
        ]
        what = (
            "; ".join(ended) or f"no rank of this machine has ended, so one hangs for more than {self.timeout_s:.0f} s"
        )
        told = re.sub(r"^\[\S+\] ", "", str(error).strip())  # without the path of gloo's source
        return f"rank {self.rank} of {self.world} lost another rank: {what} ({told[:120]}); start the trainer again"


def _key(number: int) -> str:
    return f"order/{number}"


def lost_connection(error: Exception) -> bool:
    """gloo and NCCL tell of a peer that is gone or late by plain RuntimeErrors."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return any(word in text for word in ("gloo", "Connection closed by peer", "Timed out waiting", "NCCL"))
