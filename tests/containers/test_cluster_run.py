"""A whole run at three brokers in containers that hold all streams: the one that leads the trajectories is killed while the
run goes on and comes back, then the one that leads the cluster, then two at once, so that nothing can be stored for a while. The
run goes on over all of it, ends, and its books balance.

The nodes run on what `slipstream broker init --host n1 --host n2 --host n3` writes, as it is. `make test-broker`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from shared import wire
from shared.errors import TransportError
from shared.jetstream import Connection
from shared.records import Receipt
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue
from tests.containers.brokers import ContainerBroker
from tests.containers.test_versions import VERSIONS, slipstream
from tests.e2e.test_secure_run import RUN, logs, up
from tests.shared.runs import until

pytestmark = pytest.mark.containers

STEPS = 2000
"""More than there will be: the run is stopped, and goes on to a step near by."""
DEADLINE_S = 300.0
STOPPED = 130
"""Exit code."""


async def start(broker: ContainerBroker, folder: Path, *changes: str) -> Process:
    environment = {"SLIPSTREAM_CREDENTIALS": str(broker.clients / "operator"), "SLIPSTREAM_NATS": broker.url}
    command = [sys.executable, "-m", "services.controller.cli", *up(folder, "broker.replicas=3", *changes)]
    return await asyncio.create_subprocess_exec(*command, env=os.environ | environment, stdout=PIPE, stderr=STDOUT)


class Watched:
    """The run as its streams tell of it."""

    def __init__(self, broker: ContainerBroker, folder: Path, queue: TransferQueue) -> None:
        self.broker, self.folder, self.queue = broker, folder, queue
        self.steps = 0

    async def follow(self, live: bool = True) -> None:
        """Counts updates. `up` may not have made the streams yet."""
        await self.queue.wait_for_streams(DEADLINE_S)
        async for data, _ in self.queue.read("receipts", live=live):
            receipt = wire.decode(data, Receipt)
            if receipt.kind == "trained":
                self.steps = max(self.steps, receipt.step + 1)

    async def goes_on(self, process: Process, following: asyncio.Task[None], updates: int = 4) -> None:
        """Until it has done so many more."""
        before = self.steps

        def done() -> bool:
            assert process.returncode is None, f"`up` ended\n{logs(self.folder)}"
            assert not following.done(), following.exception()
            return self.steps >= before + updates

        await until(done, f"{updates} updates after {before}; the logs are in {self.folder}", DEADLINE_S)

    async def leader_of(self, stream: str) -> str:
        info = await self.queue.connection.api(f"STREAM.INFO.{self.queue.subjects.stream(stream)}", deadline_s=60)
        assert len(info["cluster"]["replicas"]) == 2, info
        return str(info["cluster"]["leader"])

    async def whole_again(self) -> None:
        """Every stream has been seen with a leader and two that were up to date: another node may die."""
        connection = self.queue.connection
        waiting: dict[str, object] = dict.fromkeys((await connection.api("STREAM.NAMES", {}, deadline_s=60))["streams"])
        deadline = time.monotonic() + DEADLINE_S
        while waiting:
            for name in list(waiting):
                try:
                    waiting[name] = found = (await connection.api(f"STREAM.INFO.{name}", deadline_s=60))["cluster"]
                except TransportError as error:  # nobody leads it just now
                    waiting[name] = error
                    continue
                peers = found.get("replicas") or []
                if found.get("leader") and len(peers) == 2 and all(one["current"] for one in peers):
                    del waiting[name]
            assert time.monotonic() < deadline, f"not whole again: {waiting}"
            await asyncio.sleep(0.1)

    async def cluster_leader(self) -> str:
        """Who leads the cluster itself, by what the nodes say, all of which are there."""
        for host in self.broker.hosts:
            page = await asyncio.to_thread(self.broker.monitor, host, "jsz")
            if leader := page.get("meta_cluster", {}).get("leader"):
                return str(leader)
        raise AssertionError("nobody leads the cluster")


@pytest.fixture
async def watched(image: Callable[[str], str], tmp_path: Path) -> AsyncIterator[Watched]:
    with ContainerBroker(tmp_path, [RUN], image(VERSIONS[-1]), nodes=3) as broker:
        connection = await Connection.open(
            broker.url, name="test", options=broker.options("operator"), deadline_s=DEADLINE_S
        )
        try:
            yield Watched(broker, tmp_path, TransferQueue(connection, Subjects(RUN)))
        finally:
            await connection.close()


async def test_a_run_goes_on_when_its_leaders_die(watched: Watched) -> None:
    broker = watched.broker
    process = await start(broker, watched.folder, f"steps={STEPS}")
    following = asyncio.create_task(watched.follow())
    told = asyncio.create_task(process.communicate())
    try:
        await until(lambda: watched.steps or told.done() or following.done(), "the first update", DEADLINE_S)
        assert not told.done(), told.result()[0].decode()
        leader = await watched.leader_of("trajectories")
        await asyncio.to_thread(broker.kill, leader)
        await watched.goes_on(process, following)
        assert await watched.leader_of("trajectories") != leader
        await asyncio.to_thread(broker.start, leader)
        await watched.whole_again()
        leader = await watched.cluster_leader()
        await asyncio.to_thread(broker.kill, leader)
        await watched.goes_on(process, following)
        await asyncio.to_thread(broker.start, leader)
        await watched.whole_again()
        for host in broker.hosts[:2]:
            await asyncio.to_thread(broker.kill, host)
        for host in broker.hosts[:2]:
            await asyncio.to_thread(broker.start, host)
        await watched.goes_on(process, following)
        process.send_signal(signal.SIGINT)
        output = (await asyncio.wait_for(asyncio.shield(told), DEADLINE_S))[0].decode()
        assert process.returncode == STOPPED, f"{output}\n{logs(watched.folder)}"
    finally:
        following.cancel()
        if process.returncode is None:
            process.kill()
        await asyncio.gather(following, told, return_exceptions=True)
    await watched.follow(live=False)
    last = await start(broker, watched.folder, f"steps={watched.steps + 4}")
    output = (await asyncio.wait_for(last.communicate(), DEADLINE_S))[0].decode()
    assert last.returncode == 0, f"{output}\n{logs(watched.folder)}"
    audit = await asyncio.to_thread(slipstream, broker, "observer", "audit", "--json", "--run", RUN)
    found = json.loads(audit.stdout.splitlines()[-1])
    assert found["ok"], audit.stdout
    assert found["pending"] == 0
    assert found["issued"] == found["trained"] + sum(found["dropped"].values())
