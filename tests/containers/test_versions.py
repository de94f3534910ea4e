"""The transport's promises with each version of nats-server that docs/deploy-cluster.md names, on the configuration that
`slipstream broker init` writes, over a SIGKILL of the broker's container; and what an older one is told.

`make test-broker`: needs a container engine (tests/deploy/engine.py) and testcontainers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.errors import AccessDenied, BrokerTooOld, Conflict, KeyExists
from shared.jetstream import Connection
from shared.kv import KV
from shared.registry import Registry
from shared.streams import MESSAGE_LIMIT
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue
from tests.containers.brokers import ContainerBroker
from tests.e2e.test_secure_run import RUN, logs, up
from tests.shared.guarantees import makes_each_update_once, stores_each_message_once
from tests.shared.runs import make_config, until

pytestmark = pytest.mark.containers

VERSIONS = ("2.11.0", "2.12.8", "2.14.6", "2.15.1")
"""The oldest that works, and the last of each line since; the last of all is the one in constraints-cpu.txt."""
TOO_OLD = "2.10.26"
RUNS = ("publishing", "pulling", "keys", "reading", "denied", "large", RUN)
DEADLINE_S = 120.0
BROKER = 3
"""Exit code."""


@pytest.fixture(scope="module", params=VERSIONS)
def broker(
    request: pytest.FixtureRequest, image: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ContainerBroker]:
    folder = tmp_path_factory.mktemp("broker")
    with ContainerBroker(folder, list(RUNS), image(request.param)) as running:
        yield running


@pytest.fixture
async def enter(broker: ContainerBroker) -> Any:
    """`await enter(run, role)`: a queue on a connection of that role. The run's streams are there."""
    async with contextlib.AsyncExitStack() as stack:

        async def one(run: str, role: str) -> TransferQueue:
            options = broker.options(role)
            connection = await Connection.open(broker.url, name=role, options=options, deadline_s=DEADLINE_S)
            stack.push_async_callback(connection.close)
            queue = TransferQueue(connection, Subjects(run))
            stack.push_async_callback(queue.close)
            if role == "operator":
                await KV.open(connection, queue.subjects.config_bucket)
                await Registry.open(connection, queue.subjects)
                await queue.ensure_streams(make_config(run))
            return queue

        yield one


async def test_each_message_is_stored_once_over_a_sigkill(broker: ContainerBroker, enter: Any) -> None:
    await enter("publishing", "operator")
    queue = await enter("publishing", "reward")
    await stores_each_message_once(queue, broker.die_and_return, 2, DEADLINE_S)


async def test_what_was_acked_stays_acked_over_a_sigkill(broker: ContainerBroker, enter: Any) -> None:
    await enter("pulling", "operator")
    sender, worker = await enter("pulling", "controller"), await enter("pulling", "rollout")
    await sender.publish_all([(sender.subjects.prompts, b"%d" % i, f"{i}") for i in range(60)])
    puller = await worker.pull("prompts", "rollout", prefetch=8, ack_wait_s=5)

    async def take() -> int:
        delivery = await puller.next(DEADLINE_S)
        assert delivery is not None, "a message that was not acked never came"
        await delivery.ack()
        return int(delivery.data)

    before = {await take() for _ in range(30)}
    held = await puller.next(DEADLINE_S)
    assert held is not None
    await broker.die_and_return()
    await held.ack()
    after = {int(held.data)}
    while len(before | after) < 60:
        after.add(await take())
    assert not before & after, "an ack that returned was forgotten"

    async def empty() -> bool:
        return (await sender.depths())["prompts"].messages == 0

    await until(empty, "all acked messages are gone", DEADLINE_S)


async def test_compare_and_set_and_time_to_live_over_a_sigkill(broker: ContainerBroker, enter: Any) -> None:
    queue = await enter("keys", "operator")
    kv = await KV.open(queue.connection, queue.subjects.config_bucket)
    revision = await kv.create("n", b"0")
    with pytest.raises(KeyExists):
        await kv.create("n", b"1")
    assert revision == 1
    revision = await makes_each_update_once(kv, broker.die_and_return, 2, DEADLINE_S)
    with pytest.raises(Conflict):
        await kv.update("n", b"x", revision - 1)
    leases = await KV.open(queue.connection, queue.subjects.services_bucket, ttl=True, create=False)
    await leases.create("lease.trainer", b"1", ttl_s=2)
    await broker.die_and_return()

    async def gone() -> bool:
        return await leases.get("lease.trainer") is None

    await until(gone, "the key ran out, also over a restart", DEADLINE_S)
    await leases.create("lease.trainer", b"2", ttl_s=60)


async def test_a_reader_sees_each_message_once_over_a_sigkill(broker: ContainerBroker, enter: Any) -> None:
    await enter("reading", "operator")
    writer, reader = await enter("reading", "controller"), await enter("reading", "observer")
    seen: list[int] = []

    async def follow() -> None:
        async for data, _ in reader.read("receipts", live=True):
            seen.append(int(data))

    following = asyncio.create_task(follow())
    try:
        for begin in range(0, 300, 100):
            await writer.publish_all([(writer.subjects.receipts, b"%d" % i, f"{i}") for i in range(begin, begin + 100)])
            await until(lambda begin=begin: len(seen) >= begin + 50 or following.done(), "it follows", DEADLINE_S)
            await broker.die_and_return()
        await until(lambda: len(seen) >= 300 or following.done(), "it has seen all", DEADLINE_S)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert seen == list(range(300))


async def test_a_large_payload_travels_in_parts(enter: Any) -> None:
    await enter("large", "operator")
    sender, worker = await enter("large", "rollout"), await enter("large", "reward")
    payload = bytes(range(256)) * (3 * MESSAGE_LIMIT // 256)
    await sender.publish(sender.subjects.reward_requests, payload, "large")
    delivery = await (await worker.pull("rewards", "reward", prefetch=1)).next(DEADLINE_S)
    assert delivery is not None
    assert delivery.data == payload
    await delivery.ack()


async def test_what_is_refused_is_told_with_its_subject(enter: Any) -> None:
    await enter("denied", "operator")
    queue = await enter("denied", "rollout")
    with pytest.raises(AccessDenied, match=r"refuses publish on 'denied\.weights\.announced'"):
        await queue.publish(queue.subjects.announced, b"x", deadline_s=DEADLINE_S)
    with pytest.raises(AccessDenied, match=r"refuses publish on '\$js\.api\.stream\.purge\.denied_receipts'"):
        await queue.connection.api("STREAM.PURGE.denied_receipts", deadline_s=DEADLINE_S)


def slipstream(broker: ContainerBroker, role: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"SLIPSTREAM_CREDENTIALS": str(broker.clients / role), "SLIPSTREAM_NATS": broker.url}
    command = [sys.executable, "-m", "services.controller.cli", *arguments]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=600, check=False
    )


def test_a_whole_run(broker: ContainerBroker, tmp_path: Path) -> None:
    done = slipstream(broker, "operator", *up(tmp_path))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs(tmp_path)}\n{broker.log()[-5000:]}"
    audit = slipstream(broker, "observer", "audit", "--json", "--run", RUN)
    found = json.loads(audit.stdout.splitlines()[-1])
    assert found["ok"], audit.stdout
    assert found["issued"] == found["trained"] + sum(found["dropped"].values())
    assert "Permissions Violation" not in broker.log()


async def test_a_broker_that_is_too_old_is_told_at_once(image: Callable[[str], str], tmp_path: Path) -> None:
    with ContainerBroker(tmp_path, [RUN], image(TOO_OLD)) as broker:
        with pytest.raises(BrokerTooOld, match=rf"nats server v{TOO_OLD}.*needs nats-server 2\.11 or newer"):
            await Connection.open(broker.url, name="test", options=broker.options("operator"))
        done = await asyncio.to_thread(slipstream, broker, "operator", *up(tmp_path))
        assert done.returncode == BROKER
        assert "needs nats-server 2.11 or newer" in done.stderr
        assert "Traceback" not in done.stderr
