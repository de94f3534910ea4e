"""The broadcast group with real processes: what is sent arrives, and the dead and the stopped do not hold up the living."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from services.dcs import collective
from services.dcs.collective import CollectiveError

SIZE = 8 << 20
LONG_S = 120.0
"""Of a group in which nobody may wait for it."""
SHORT_S = 4.0
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["services.dcs.collective"])  # torch is imported once, not in every member


def member(port: int, rank: int, world: int, deadline_s: float, said: Connection) -> None:
    torch.set_num_threads(1)
    said.send(("ready", os.getpid()))
    said.recv()
    try:
        group = collective.join("127.0.0.1", port, world, rank, "g", "gloo", deadline_s)
        for _ in range(1000):
            bucket = torch.zeros(SIZE, dtype=torch.uint8)
            collective.broadcast(group, bucket, time.monotonic() + deadline_s)
            said.send(("got", int(bucket[0])))
            if bucket[0] == 255:
                collective.leave(group)
                return
    except CollectiveError as error:
        said.send(("failed", str(error)))


class Members:
    """Two member processes; the test is rank 0."""

    def __init__(self, deadline_s: float = LONG_S) -> None:
        self.deadline_s = deadline_s
        self.store = collective.host_store(deadline_s)
        self.group: Any = None
        self.said: dict[int, Connection] = {}
        self.processes = []
        for rank in (1, 2):
            self.said[rank], theirs = PROCESSES.Pipe()
            process = PROCESSES.Process(target=member, args=(self.store.port, rank, 3, deadline_s, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
        self.pids = {rank: self.wait_for(rank, "ready") for rank in (1, 2)}

    def join(self) -> None:
        for rank in self.said:
            self.said[rank].send("go")
        self.group = collective.join("127.0.0.1", self.store.port, 3, 0, "g", "gloo", self.deadline_s, self.store)

    def send(self, value: int, deadline_s: float = LONG_S) -> None:
        bucket = torch.full((SIZE,), value, dtype=torch.uint8)
        collective.broadcast(self.group, bucket, time.monotonic() + deadline_s)

    def wait_for(self, rank: int, kind: str) -> Any:
        """The next thing of this kind that the member says."""
        while self.said[rank].poll(300.0):
            what, value = self.said[rank].recv()
            if what == kind:
                return value
        raise AssertionError(f"rank {rank} said no {kind!r}")

    def leave(self) -> None:
        collective.leave(self.group)
        self.group = None

    def close(self) -> None:
        if self.group is not None:
            self.leave()
        for process in self.processes:
            process.kill()
            process.join(60)


@pytest.fixture
def members() -> Iterator[Members]:
    started = Members()
    yield started
    started.close()


def test_everyone_gets_what_is_sent_and_leaves(members: Members) -> None:
    members.join()
    members.send(7)
    members.send(255)
    for rank in (1, 2):
        assert members.wait_for(rank, "got") == 7
        assert members.wait_for(rank, "got") == 255
    for process in members.processes:
        process.join(60)
        assert process.exitcode == 0


def test_a_killed_member_ends_the_broadcast_for_all(members: Members) -> None:
    members.join()
    members.send(1)
    started = time.monotonic()
    os.kill(members.pids[1], signal.SIGKILL)
    with pytest.raises(CollectiveError, match="broadcast of 8388608 bytes failed"):
        for _ in range(50):
            members.send(2)
    members.leave()
    assert "failed" in members.wait_for(2, "failed")
    assert time.monotonic() - started < LONG_S, "it did not take a deadline to tell"


def test_a_stopped_member_costs_the_deadline_and_no_more(members: Members) -> None:
    members.join()
    members.send(1)
    os.kill(members.pids[1], signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(CollectiveError):
        for _ in range(50):
            members.send(2, deadline_s=1.0)
    members.leave()
    members.wait_for(2, "failed")
    assert time.monotonic() - started < LONG_S, "the others need not wait for theirs"


def test_a_member_that_never_comes_costs_the_deadline() -> None:
    members = Members(SHORT_S)
    try:
        members.processes[0].kill()
        members.processes[0].join(60)
        del members.said[1]
        with pytest.raises(CollectiveError, match=r"group g: rank 0 of 3 could not join"):
            members.join()
        assert "could not join" in members.wait_for(2, "failed")
    finally:
        members.close()


def test_a_deadline_that_is_over_sends_nothing() -> None:
    store = collective.host_store(LONG_S)
    group = collective.join("127.0.0.1", store.port, 1, 0, "alone", "gloo", LONG_S, store)
    with pytest.raises(CollectiveError, match="time was up"):
        collective.broadcast(group, torch.zeros(1, dtype=torch.uint8), time.monotonic())
    collective.leave(group)
    collective.leave(group)
