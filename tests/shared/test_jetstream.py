"""The connection: errors that say what is wrong instead of time-outs, and links that come back."""

from __future__ import annotations

import asyncio
import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared import jetstream
from shared.broker import EmbeddedBroker
from shared.channel import redact
from shared.config import ConfigError
from shared.errors import AccessDenied, ApiError, BrokerTooOld, BrokerUnavailable, NotJetStream, StorageExhausted
from shared.jetstream import Connection
from shared.kv import KV
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue
from tests.shared.runs import make_config, open_queue, until

ADMIN = "nats://admin:secret@"


@pytest.fixture
def guarded(tmp_path: Path, run_name: str) -> Iterator[EmbeddedBroker]:
    """A broker on which `worker` may do little, and nothing in vain."""
    allowed = [f"{run_name}.prompts", "$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.CONSUMER.CREATE.>"]
    users = [
        {"user": "admin", "password": "secret"},
        {
            "user": "worker",
            "password": "pw",
            "permissions": {"publish": {"allow": allowed}, "subscribe": {"allow": ["_INBOX.>"]}},
        },
        {"user": "deaf", "password": "pw", "permissions": {"subscribe": {"deny": ["_INBOX.>"]}}},
    ]
    with EmbeddedBroker(tmp_path / "store", options={"authorization": {"users": users}}) as broker:
        yield broker


def as_user(broker: EmbeddedBroker, login: str) -> str:
    return broker.url.replace("nats://", f"nats://{login}@")


async def test_no_broker_there() -> None:
    with socket.socket() as nobody:  # it has the port and does not listen
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(BrokerUnavailable, match=rf"no broker at nats://127.0.0.1:{port} .*nats-server -js"):
            await asyncio.wait_for(Connection.open(f"nats://127.0.0.1:{port}", name="test", deadline_s=0.5), 60)


async def test_broker_that_starts_late(tmp_path: Path, connect: Any) -> None:
    broker = EmbeddedBroker(tmp_path).start()
    url = broker.url
    broker.stop()
    opening = asyncio.create_task(connect(url))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(broker.start)
    assert (await opening).connected
    broker.stop()


async def test_something_else_listens_there() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(BrokerUnavailable, match="no broker at"):
            await Connection.open(f"nats://127.0.0.1:{server.server_port}", name="test", deadline_s=1)
    finally:
        server.shutdown()
        server.server_close()


async def test_server_without_jetstream(tmp_path: Path) -> None:
    options = {"accounts": {"A": {"users": [{"user": "a", "password": "a"}]}, "SYS": {}}, "system_account": "SYS"}
    with EmbeddedBroker(tmp_path, options=options) as broker:
        with pytest.raises(NotJetStream, match=r"has no JetStream .*nats-server -js"):
            await Connection.open(as_user(broker, "a:a"), name="test", deadline_s=2)


async def test_a_server_that_lets_no_message_run_out(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this one were older than it is; tests/containers has one that is."""
    monkeypatch.setattr(jetstream, "LEAST_LEVEL", 1000)
    with pytest.raises(BrokerTooOld, match=r"too old \(nats server v\d+\.\d+.*needs nats-server 2\.11 or newer"):
        await Connection.open(broker.url, name="test")


async def test_wrong_login_ends_at_once_and_hides_the_password(guarded: EmbeddedBroker) -> None:
    with pytest.raises(BrokerUnavailable, match=r"(?i)nats://worker:\*\*\*@.*authorization violation.*login") as error:
        opening = Connection.open(as_user(guarded, "worker:wrong"), name="test", deadline_s=3600)
        await asyncio.wait_for(opening, 60)
    assert "wrong" not in str(error.value)
    assert redact("nats://a:b@h:1") == "nats://a:***@h:1"
    assert redact("nats://h:1") == "nats://h:1"


async def test_denied_publish_names_the_subject(guarded: EmbeddedBroker, connect: Any, run_name: str) -> None:
    await open_queue(await connect(as_user(guarded, "admin:secret")), run_name)
    queue = TransferQueue(await connect(as_user(guarded, "worker:pw")), Subjects(run_name))
    assert await queue.publish(queue.subjects.prompts, b"may") == 1
    with pytest.raises(AccessDenied, match=rf"refuses publish on '{run_name}.receipts'.*permissions"):
        await asyncio.wait_for(queue.publish(queue.subjects.receipts, b"may not", deadline_s=3600), 60)
    with pytest.raises(AccessDenied, match=r"refuses publish on '\$js.api.stream.info"):
        _ = [seq async for _, seq in queue.read("receipts")]


async def test_denied_pull_names_the_subject(guarded: EmbeddedBroker, connect: Any, run_name: str) -> None:
    await open_queue(await connect(as_user(guarded, "admin:secret")), run_name)
    queue = TransferQueue(await connect(as_user(guarded, "worker:pw")), Subjects(run_name))
    puller = await queue.pull("prompts", "rollout", prefetch=0)
    with pytest.raises(AccessDenied, match=rf"CONSUMER.MSG.NEXT.{run_name}_prompts.rollout"):
        await puller.next(60)


async def test_denied_ack_names_the_subject(guarded: EmbeddedBroker, connect: Any, run_name: str) -> None:
    admin = await open_queue(await connect(as_user(guarded, "admin:secret")), run_name)
    await admin.publish(admin.subjects.prompts, b"x")
    puller = await admin.pull("prompts", "rollout", prefetch=0)
    delivery = await puller.next(60)
    assert delivery is not None
    worker = await connect(as_user(guarded, "worker:pw"))
    puller.connection, puller._channel = worker, worker.bulk
    with pytest.raises(AccessDenied, match=r"refuses publish on '\$js.ack"):
        await delivery.ack()


async def test_denied_inbox_is_not_silence(guarded: EmbeddedBroker) -> None:
    with pytest.raises(AccessDenied, match=r"refuses subscription on '_inbox"):
        await Connection.open(as_user(guarded, "deaf:pw"), name="test", deadline_s=60)


async def test_run_that_does_not_fit_into_the_broker(tmp_path: Path, connect: Any, run_name: str) -> None:
    with EmbeddedBroker(tmp_path, options={"jetstream": {"max_file_store": 100 << 20}}) as broker:
        queue = TransferQueue(await connect(broker.url), Subjects(run_name))
        with pytest.raises(StorageExhausted, match=rf"no room for .*{run_name}_.*max_file_store.*broker.max_bytes"):
            await queue.ensure_streams(make_config(run_name))


async def test_broker_that_runs_out_of_storage(tmp_path: Path, connect: Any, run_name: str) -> None:
    with EmbeddedBroker(tmp_path, options={"jetstream": {"max_file_store": 20 << 20}}) as broker:
        connection = await connect(broker.url)
        queue = TransferQueue(connection, Subjects(run_name))
        await connection.api(
            f"STREAM.CREATE.{run_name}_prompts", {"name": f"{run_name}_prompts", "subjects": [f"{run_name}.prompts"]}
        )
        with pytest.raises(StorageExhausted, match=rf"no room for '{run_name}.prompts'.*Free disk"):
            for _ in range(40):
                await queue.publish(queue.subjects.prompts, bytes(800 << 10), deadline_s=60)


async def test_too_small_config_is_refused_before_anything_is_made(
    broker: EmbeddedBroker, connect: Any, run_name: str
) -> None:
    connection = await connect(broker.url)
    with pytest.raises(ConfigError, match=r"broker.max_bytes: .* too small.*Set it to at least \d+"):
        await open_queue(
            connection, run_name, broker={"max_bytes": 64 << 20}, groups_per_step=256, samples_per_group=64
        )
    with pytest.raises(ApiError, match="stream not found"):
        await connection.api(f"STREAM.INFO.{run_name}_prompts")


async def test_ensure_streams_twice_and_with_other_limits(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    connection = await connect(broker.url)
    queue = await open_queue(connection, run_name)
    await queue.publish(queue.subjects.receipts, b"kept")
    await asyncio.gather(*(queue.ensure_streams(make_config(run_name)) for _ in range(3)))
    await queue.ensure_streams(make_config(run_name, broker={"max_bytes": 300 << 20}))
    assert [data async for data, _ in queue.read("receipts")] == [b"kept"]


async def test_calls_wait_for_a_broker_that_restarts(own_broker: EmbeddedBroker, connect: Any) -> None:
    connection = await connect(own_broker.url)
    kv = await KV.open(connection, "bucket")
    await kv.put("a", b"1")
    await asyncio.to_thread(own_broker.kill)
    await until(lambda: not connection.connected, "the loss is seen")
    reading = asyncio.create_task(kv.get("a"))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(own_broker.start)
    assert (await asyncio.wait_for(reading, 60) or (b"", 0))[0] == b"1"
    kv.close()


async def test_client_that_gave_up_is_replaced(own_broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    """nats-py closes itself for good on some server errors; the channel then makes a new client."""
    connection = await connect(own_broker.url)
    queue = await open_queue(connection, run_name)
    puller = await queue.pull("prompts", "worker", prefetch=0)
    waiting = asyncio.create_task(puller.next(60))
    for channel in (connection.bulk, connection.control):
        before, closed = channel.connections, channel.nc
        await closed.close()
        await until(lambda c=channel, n=before: c.connections > n, "a new client")
        assert channel.nc is not closed
    await queue.publish(queue.subjects.prompts, b"after")
    delivery = await waiting
    assert delivery is not None
    await delivery.ack()


async def test_closed_connection_fails_what_still_waits(
    own_broker: EmbeddedBroker, connect: Any, run_name: str
) -> None:
    connection = await connect(own_broker.url)
    queue = await open_queue(connection, run_name)
    await asyncio.to_thread(own_broker.kill)
    waiting = asyncio.create_task(queue.publish(queue.subjects.prompts, b"x"))
    await asyncio.sleep(0.1)
    await connection.close()
    with pytest.raises(BrokerUnavailable, match="closed by this process"):
        await asyncio.wait_for(waiting, 60)
