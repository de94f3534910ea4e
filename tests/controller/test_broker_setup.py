"""`slipstream broker init`, tried on real nats-servers: who gets in, who may do what, and what is said where it is refused."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from typer.testing import CliRunner

from services.controller.broker_setup import folder as setup
from services.controller.cli import app
from services.rollout.tries import ENOUGH, Tries
from shared import credentials, wire
from shared.broker import EmbeddedBroker
from shared.config import ConfigError
from shared.errors import AccessDenied, BrokerRefuses
from shared.jetstream import Connection
from shared.kv import KV
from shared.permissions import ROLES
from shared.records import Heartbeat, Receipt
from shared.registry import Registry
from shared.subjects import STREAMS, Subjects
from shared.transfer_queue import TransferQueue
from tests.shared.runs import make_config, until
from tests.shared.secure import SecureBroker

RUN = "guarded"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    with SecureBroker(tmp_path_factory.mktemp("secure"), [RUN, "other"]) as running:
        yield running


@pytest.fixture
async def enter(secure: SecureBroker) -> Any:
    """`await enter("rollout")`: a queue on a connection of that role."""
    async with contextlib.AsyncExitStack() as stack:

        async def one(role: str, run: str = RUN) -> TransferQueue:
            connection = await Connection.open(secure.url, name=role, options=secure.options(role), deadline_s=60)
            stack.push_async_callback(connection.close)
            queue = TransferQueue(connection, Subjects(run))
            stack.push_async_callback(queue.close)
            return queue

        owner = await one("operator")
        await KV.open(owner.connection, owner.subjects.config_bucket)
        await Registry.open(owner.connection, owner.subjects)
        await owner.ensure_streams(make_config(RUN))
        yield one


def everything(subjects: Subjects) -> dict[str, list[str]]:
    """stream -> subjects that a role may or may not publish to."""
    return {
        "prompts": [subjects.prompts],
        "partials": [subjects.partial("0-1", 0)],
        "rewards": [subjects.reward_requests],
        "trajectories": [subjects.trajectory("0-1")],
        "teacher": [subjects.stage("teacher")],
        "reference": [subjects.stage("reference")],
        "advantages": [subjects.advantages],
        "receipts": [subjects.receipts, subjects.reported],
        "weights": [subjects.announced, subjects.received],
        "metrics": [subjects.metrics(service, "x") for service in ("controller", "rollout", "trainer")],
        "events": [subjects.events(service) for service in ("controller", "rollout", "trainer")],
        "dead": [subjects.dead("rollout"), subjects.dead("trainer")],
        "blobs": [subjects.blob("0" * 64, 0)],
        "archive": [subjects.archived("0" * 64, 0)],
    }


FORBIDDEN = {
    "controller": {"rewards", "trajectories", "advantages", "weights", "partials", "teacher", "reference", "dead"},
    "trainer": {"prompts", "rewards", "trajectories", "advantages", "weights", "partials", "teacher", "reference"},
    "rollout": {"prompts", "trajectories", "advantages", "teacher", "reference"},
    "reward": {"prompts", "rewards", "weights", "partials"},
    "stage": {"prompts", "rewards", "trajectories", "partials"},
    "dcs": set(STREAMS) - {"weights", "metrics", "events", "blobs", "archive"},
    "operator": {"prompts", "rewards", "trajectories", "advantages", "weights", "partials", "dead"},
    "observer": set(STREAMS),
}
ALSO_FORBIDDEN = {
    "controller": ["metrics.rollout.x", "events.trainer"],
    "trainer": ["metrics.rollout.x", "events.controller"],
    "rollout": ["receipts", "weights.announced", "dead.trainer", "metrics.trainer.x", "events.controller"],
    "reward": ["receipts", "dead.rollout", "metrics.rollout.x"],
    "stage": ["receipts", "weights.announced", "dead.rollout", "metrics.rollout.x"],
    "dcs": ["weights.received", "metrics.rollout.x", "events.trainer"],
    "operator": [],
    "observer": [],
}


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_publishes_its_own_subjects_only(enter: Any, role: str) -> None:
    """And hears at once which subject it was, not of a time-out."""
    queue = await enter(role)
    refused = [subject for stream in FORBIDDEN[role] for subject in everything(queue.subjects)[stream]]
    refused += [f"{RUN}.{rest}" for rest in ALSO_FORBIDDEN[role]]
    assert refused
    async with asyncio.timeout(120):  # not one of them waits for its deadline
        for subject in refused:
            with pytest.raises(AccessDenied, match=f"refuses publish on '{subject.lower()}'"):
                await queue.publish(subject, b"x", deadline_s=3600)
    elsewhere = Subjects("elsewhere")
    with pytest.raises((AccessDenied, ValueError)):
        await TransferQueue(queue.connection, elsewhere).publish(elsewhere.reported, b"x", deadline_s=60)


@pytest.mark.parametrize(
    ("role", "verb", "body"),
    [
        ("rollout", "STREAM.CREATE.bridge", {"name": "bridge", "subjects": ["bridge.>"]}),
        ("rollout", f"STREAM.UPDATE.{RUN}_receipts", {"name": f"{RUN}_receipts"}),
        ("rollout", f"STREAM.DELETE.{RUN}_receipts", None),
        ("rollout", f"STREAM.PURGE.{RUN}_receipts", None),
        ("rollout", f"STREAM.MSG.DELETE.{RUN}_advantages", {"seq": 1}),
        ("rollout", f"CONSUMER.DELETE.{RUN}_advantages.trainer", None),
        ("rollout", f"CONSUMER.MSG.NEXT.{RUN}_advantages.trainer", {"batch": 1}),
        ("rollout", f"CONSUMER.CREATE.{RUN}_advantages.thief.{RUN}.advantages", {}),
        ("rollout", f"CONSUMER.CREATE.{RUN}_prompts.rollout.{RUN}.rewards.requests", {}),
        ("reward", f"CONSUMER.MSG.NEXT.{RUN}_prompts.rollout", {"batch": 1}),
        ("trainer", f"STREAM.PURGE.{RUN}_receipts", None),
        ("dcs", f"STREAM.DELETE.{RUN}_weights", None),
        ("observer", f"STREAM.PURGE.KV_{RUN}_services", None),
        ("observer", f"STREAM.CREATE.{RUN}_prompts", {}),
        ("controller", f"STREAM.DELETE.{RUN}_receipts", None),
    ],
)
async def test_nobody_manages_what_is_not_its_own(enter: Any, role: str, verb: str, body: Any) -> None:
    queue = await enter(role)
    with pytest.raises(AccessDenied, match="refuses publish on"):
        await queue.connection.api(verb, body, deadline_s=60)


async def test_config_keys_and_leases_belong_to_their_services(enter: Any) -> None:
    for role, key in (("rollout", "config"), ("rollout", "dcs"), ("dcs", "state"), ("trainer", "cursor")):
        queue = await enter(role)
        kv = await KV.open(queue.connection, queue.subjects.config_bucket, create=False)
        with pytest.raises(AccessDenied, match=rf"\$kv.{RUN}_config.{key}"):
            await kv.put(key, b"x")
    queue = await enter("rollout")
    registry = await Registry.open(queue.connection, queue.subjects, create=False)
    with pytest.raises(AccessDenied, match="lease.trainer"):
        await registry.claim("trainer")


async def test_a_rollout_counts_how_often_a_suspect_was_drawn_alone(enter: Any) -> None:
    queue = await enter("rollout")
    tries = Tries(await KV.open(queue.connection, queue.subjects.config_bucket, create=False), max_deliveries=5)
    for group_id in ("0-7", "0-7.1", "eval-3-7"):
        delivery: Any = SimpleNamespace(msg_id=group_id, delivered=6)
        for _ in range(ENOUGH):
            assert await tries.verdict(delivery) == ""
            await tries.begin(group_id)
        assert await tries.verdict(delivery) != ""
        await tries.came_through(group_id)
        assert await tries.verdict(delivery) == ""


@pytest.mark.parametrize("role", ROLES)
async def test_everybody_may_see_who_is_there(enter: Any, role: str) -> None:
    worker = await enter("rollout")
    beats = await Registry.open(worker.connection, worker.subjects, create=False)
    await beats.beat(Heartbeat("rollout", "seen", "idle", 0, 1, 1, {}, "h", 1, 0.0, 0.0))
    queue = await enter(role)
    registry = await Registry.open(queue.connection, queue.subjects, create=False)
    assert "seen" in [beat.replica for beat in await registry.alive()]


async def test_a_worker_may_drop_a_group_and_no_more(enter: Any) -> None:
    """What it says beyond that of the ledger's matters is read as if it were damaged."""
    rollout, reader = await enter("rollout"), await enter("observer")
    await rollout.publish(rollout.subjects.reported, Receipt("dropped", "0-1", reason="prompt_too_long"))
    await rollout.publish(rollout.subjects.reported, Receipt("trained", "0-2", step=3, replica="rollout-0"))
    read = [data async for data, _ in reader.read("receipts")]
    assert wire.decode(read[-2], Receipt).reason == "prompt_too_long"
    assert read[-1] is wire.UNFIT
    assert await reader.last_seq("receipts") >= 2


async def test_what_the_broker_carries_to_where_its_writer_may_not_write_is_not_believed(enter: Any) -> None:
    """Whoever may read a log can create a consumer, and a consumer can be told to deliver to any subject."""
    rollout, reader = await enter("rollout"), await enter("observer")
    before = await reader.last_seq("receipts")
    await rollout.publish(rollout.subjects.partial("0-9", 0), Receipt("trained", "0-9", step=3))
    config = {"name": "carrier", "deliver_subject": f"{RUN}.receipts", "ack_policy": "none", "deliver_policy": "all"}
    body = {"stream_name": f"{RUN}_partials", "config": config | {"replay_policy": "instant"}}
    await rollout.connection.api(f"CONSUMER.CREATE.{RUN}_partials.carrier", body)

    async def carried() -> bool:
        return await reader.last_seq("receipts") > before

    await until(carried, "the broker has carried it over")
    assert [data is wire.UNFIT async for data, _ in reader.read("receipts", start_seq=before + 1)] == [True]
    assert await reader.last(reader.subjects.receipts) is None


async def test_an_observer_hears_everything(enter: Any, secure: SecureBroker) -> None:
    """With any NATS client."""
    heard: list[str] = []

    async def note(message: Msg) -> None:
        heard.append(message.subject)

    rollout, observer = await enter("rollout"), Client()
    await observer.connect(secure.url, **secure.options("observer"))
    try:
        await observer.subscribe(f"{RUN}.metrics.>", cb=note)
        await observer.flush()
        await observer.flush()
        rollout.emit(rollout.subjects.metrics("rollout", "r0"), b"x")
        await until(lambda: heard == [f"{RUN}.metrics.rollout.r0"], "the metric is heard")
    finally:
        await observer.close()


# Who gets in


async def open_as(secure: SecureBroker, options: dict[str, Any]) -> None:
    connection = await Connection.open(secure.url, name="test", options=options, deadline_s=60)
    await connection.close()


async def test_a_wrong_key_is_told_at_once(secure: SecureBroker, tmp_path: Path) -> None:
    setup.write(tmp_path / "others", setup.extend(setup.Plan(), [RUN], [], []))
    stranger = (tmp_path / "others" / "clients" / "rollout" / "nkey").read_text()
    with pytest.raises(
        BrokerRefuses, match=r"(?i)authorization violation.*does not know this login.*SLIPSTREAM_CREDENTIALS"
    ):
        await open_as(secure, secure.options("rollout") | {"nkeys_seed_str": stranger})


async def test_no_key_is_told_at_once(secure: SecureBroker) -> None:
    with pytest.raises(BrokerRefuses, match=r"does not know this login"):
        await open_as(secure, {"tls": secure.options("rollout")["tls"]})


async def test_an_authority_that_is_not_known_is_told_at_once(secure: SecureBroker) -> None:
    with pytest.raises(BrokerRefuses, match=r"certificate verify failed.*ca\.pem signed it"):
        await open_as(secure, secure.options("rollout") | {"tls": ssl.create_default_context()})


async def test_a_name_that_the_certificate_lacks_is_told_at_once(secure: SecureBroker) -> None:
    options = secure.options("rollout") | {"tls_hostname": "elsewhere.example.org"}
    with pytest.raises(BrokerRefuses, match=r"(?i)hostname mismatch.*--also"):
        await open_as(secure, options)


async def test_an_expired_certificate_is_told_at_once(tmp_path: Path) -> None:
    with SecureBroker(tmp_path, [RUN], days=0) as expired:
        with pytest.raises(BrokerRefuses, match=r"certificate has expired.*slipstream broker init"):
            await open_as(expired, expired.options("rollout"))


async def test_nothing_is_said_in_the_clear(broker: EmbeddedBroker, secure: SecureBroker) -> None:
    """A broker without TLS may be anybody."""
    with pytest.raises(BrokerRefuses, match=r"does not offer TLS.*nothing is sent to it in the clear"):
        await Connection.open(broker.url, name="test", options=secure.options("rollout"), deadline_s=60)


# The folder


def test_again_it_keeps_keys_and_adds_runs(tmp_path: Path) -> None:
    runner, folder = CliRunner(), tmp_path / "secrets"
    first = runner.invoke(app, ["broker", "init", str(folder), "--run", "one", "--host", "b1", "--also", "10.0.0.7"])
    assert first.exit_code == 0, first.output
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".conf"}
    assert runner.invoke(app, ["broker", "init", str(folder)]).stdout.startswith("everything is there already")
    again = runner.invoke(app, ["broker", "init", str(folder), "--run", "two"])
    assert again.stdout == "nodes/b1/server.conf: a new configuration\nruns: one, two\n"
    changed = [path.name for path, before in kept.items() if path.read_bytes() != before]
    assert changed == ["broker.json"]
    text = (folder / "nodes" / "b1" / "server.conf").read_text()
    assert '"one.receipts"' in text
    assert '"two.receipts"' in text
    for private in ("authority/ca.key", "nodes/b1/server.key", "clients/rollout/nkey", "clients/rollout/token"):
        assert (folder / private).stat().st_mode & 0o077 == 0, private
    tokens = {role: (folder / "clients" / role / "token").read_text().split() for role in setup.TOKENS}
    assert tokens["rollout"] == [tokens["dcs"][0]] != tokens["controller"]
    assert tokens["dcs"][1:] == tokens["controller"]
    assert not (folder / "clients" / "reward" / "token").exists(), "it calls nobody"
    more = runner.invoke(app, ["broker", "init", str(folder), "--also", "broker.example.org"])
    assert "a new certificate for b1, 10.0.0.7, broker.example.org, localhost, 127.0.0.1" in more.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--run: name at least one run"),
        (["--run", "a.b"], "--run: run name 'a.b'"),
        (["--run", "a", "--host", "x", "--host", "y"], r"--host: 2 nodes \(x, y\); a broker has 1, 3 or 5"),
        (["--run", "a", "--host", "x", "--host", "x", "--host", "y"], "each under its own name"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["broker", "init", str(tmp_path / "secrets"), *arguments])
    assert result.exit_code == 2
    assert re.search(says, result.output)
    assert not (tmp_path / "secrets").exists()


# SLIPSTREAM_CREDENTIALS


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (None, "cannot read the folder"),
        ({}, "holds none of nkey, user.creds"),
        ({"nkey": "hello"}, "nkey holds no seed of an nkey"),
        ({"ca.pem": "hello"}, "ca.pem holds no certificate"),
        ({"client.pem": "hello", "ca.pem": None}, "client.pem and client.key are no pair"),
    ],
)
def test_credentials_that_are_none(
    secure: SecureBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str | None] | None,
    says: str,
) -> None:
    place = tmp_path / "credentials"
    monkeypatch.setenv(credentials.CREDENTIALS, str(place))
    if files is not None:
        place.mkdir()
        for name, text in files.items():
            (place / name).write_text(text or (secure.clients / "rollout" / name).read_text())
    with pytest.raises(ConfigError, match=says):
        credentials.options()


async def test_credentials_come_by_the_environment(secure: SecureBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(credentials.CREDENTIALS, str(secure.clients / "observer"))
    connection = await Connection.open(secure.url, name="test", deadline_s=60)
    await connection.close()
    monkeypatch.delenv(credentials.CREDENTIALS)
    assert credentials.options() == {}
