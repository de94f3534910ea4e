"""What each role may do at a broker that asks for permissions, as data: the subjects come from shared/subjects.py.

A role is a key at the broker. Everybody may read the run's logs and say how it is; who may write what is the table ROLES. In
particular a rollout replica publishes neither weights nor receipts other than "this group is dropped". Only `controller` and
`operator` create streams: whoever may do that can make the broker copy messages to any subject.

`slipstream broker init` writes this into the broker's configuration (services/controller/broker_setup). It is tried on a real
broker: each role's forbidden subjects in tests/controller/test_broker_setup.py, a whole run in tests/e2e/test_secure_run.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shared.subjects import STREAMS, Subjects

API = "$JS.API"
INBOX = "_INBOX.>"
QUEUES = ("prompts", "rewards", "teacher", "reference", "advantages")
LOGS = ("partials", "trajectories", "receipts", "weights", "metrics", "events", "dead")


@dataclass(frozen=True, slots=True)
class Role:
    """What one kind of client does."""

    services: tuple[str, ...] = ()
    """Names under which it beats, counts and tells of events."""
    publishes: Callable[[Subjects], list[str]] = lambda subjects: []
    """Subjects of its own, beside those of every service."""
    pulls: tuple[tuple[str, str], ...] = ()
    """(stream, durable consumer; `*` for one that is made anew with every start)."""
    purges: tuple[str, ...] = ()
    """Streams of which it removes messages."""
    leases: bool = False
    """Only one replica of it is active."""
    config_keys: tuple[str, ...] = ()
    """Keys of the run's config bucket that it writes."""
    settles: bool = False
    """Takes keys out of the config bucket again (a wish that it has fulfilled)."""
    owner: bool = False
    """Creates the run's streams and buckets, and brings their limits up to date."""
    launches: bool = False
    """Starts and ends replicas, and tells that it is there (shared/wanted.py)."""
    follows: bool = False
    """Subscribes to the run's subjects directly."""


def _large(subjects: Subjects) -> list[str]:
    """Where payloads above a message's limit go."""
    return [subjects.blob("*", "*"), subjects.archived("*", "*")]


ROLES = {
    "controller": Role(
        services=("controller",),
        publishes=lambda s: [s.prompts, s.receipts, s.reported, *_large(s)],
        leases=True,
        config_keys=(">",),
        owner=True,
    ),
    "trainer": Role(
        services=("trainer",),
        publishes=lambda s: [s.receipts, s.reported, s.dead("*"), *_large(s)],
        pulls=(("advantages", "*"),),
        purges=("blobs",),
        leases=True,
        config_keys=("turns",),
        settles=True,
    ),
    "rollout": Role(
        services=("rollout",),
        publishes=lambda s: [
            s.reward_requests,
            s.partial("*", "*"),
            s.received,
            s.reported,
            s.dead("rollout"),
            *_large(s),
        ],
        pulls=(("prompts", "rollout"),),
        purges=("partials", "blobs"),
        config_keys=("turns", "tries.>"),
    ),
    "reward": Role(
        services=("reward",),
        publishes=lambda s: [
            s.trajectory("*"),
            s.stage("teacher"),
            s.stage("reference"),
            s.advantages,
            s.reported,
            s.dead("reward"),
            s.dead("advantages"),
            *_large(s),
        ],
        pulls=(("rewards", "reward"), ("trajectories", "advantages")),
        purges=("blobs",),
    ),
    "stage": Role(
        services=("teacher", "reference"),
        publishes=lambda s: [
            s.stage("teacher"),
            s.stage("reference"),
            s.advantages,
            s.received,
            s.reported,
            s.dead("teacher"),
            s.dead("reference"),
            *_large(s),
        ],
        pulls=(("teacher", "teacher"), ("reference", "reference")),
        purges=("blobs",),
    ),
    "dcs": Role(
        services=("dcs",), publishes=lambda s: [s.announced, *_large(s)], leases=True, config_keys=("dcs", "rollback")
    ),
    "operator": Role(
        services=("*",),
        publishes=lambda s: [s.receipts, s.reported, *_large(s)],
        leases=True,
        config_keys=(">",),
        owner=True,
        launches=True,
        follows=True,
    ),
    "observer": Role(follows=True),
}
"""`operator` is the person at the command line, `observer` whatever only looks: dashboards, metrics sinks, curators."""


def of(role: str, runs: Iterable[str]) -> dict[str, Any]:
    """nats-server's `permissions` of a role, for these runs and no others."""
    publish, subscribe = [f"{API}.INFO", f"{API}.STREAM.NAMES"], [INBOX]
    for run in runs:
        subjects = Subjects(run)
        publish += _publish(ROLES[role], subjects)
        if ROLES[role].follows:
            subscribe.append(f"{run}.>")
    return {"publish": {"allow": list(dict.fromkeys(publish))}, "subscribe": {"allow": subscribe}}


def _publish(role: Role, subjects: Subjects) -> Iterator[str]:
    streams = [subjects.stream(name) for name in STREAMS]
    buckets = [f"KV_{subjects.config_bucket}", f"KV_{subjects.services_bucket}"]
    for name in (*streams, *buckets):
        yield from (f"{API}.STREAM.INFO.{name}", f"{API}.STREAM.MSG.GET.{name}", f"{API}.CONSUMER.LIST.{name}")
        if role.owner:
            yield from (f"{API}.STREAM.CREATE.{name}", f"{API}.STREAM.UPDATE.{name}", f"{API}.STREAM.PURGE.{name}")
    yield f"{API}.DIRECT.GET.KV_{subjects.services_bucket}"
    for name in ("blobs", "archive"):
        yield f"{API}.DIRECT.GET.{subjects.stream(name)}.>"
    for name in LOGS:
        yield from _reading(subjects.stream(name))
    for name, durable in role.pulls:
        yield from _pulling(subjects, name, durable)
    for name in role.purges:
        yield f"{API}.STREAM.PURGE.{subjects.stream(name)}"
    yield from role.publishes(subjects)
    yield from _being_there(role, subjects)


def _reading(stream: str) -> Iterator[str]:
    """A log reader's consumers have names of their own, and nobody's work hangs on them."""
    yield from (f"{API}.CONSUMER.CREATE.{stream}.*", f"{API}.CONSUMER.CREATE.{stream}.*.>")
    yield from (f"{API}.CONSUMER.{verb}.{stream}.*" for verb in ("INFO", "DELETE", "MSG.NEXT"))


def _pulling(subjects: Subjects, name: str, durable: str) -> Iterator[str]:
    stream = subjects.stream(name)
    yield f"{API}.CONSUMER.CREATE.{stream}.{durable}.{subjects.wildcard(name)}"
    yield from (f"{API}.CONSUMER.{verb}.{stream}.{durable}" for verb in ("INFO", "MSG.NEXT"))
    yield f"$JS.ACK.{stream}.{durable}.>"
    if name in QUEUES:
        yield f"{API}.STREAM.MSG.DELETE.{stream}"
    if durable == "*":
        yield f"{API}.CONSUMER.DELETE.{stream}.*"


def _being_there(role: Role, subjects: Subjects) -> Iterator[str]:
    """Heartbeats, leases, metrics, events, and the config's keys."""
    for service in role.services:
        yield from (subjects.metrics(service, "*"), subjects.events(service))
        yield f"$KV.{subjects.services_bucket}.beat.{service}.*"
        if role.leases:
            yield f"$KV.{subjects.services_bucket}.lease.{service}"
    if role.services:
        yield f"$KV.{subjects.services_bucket}.probe"
        yield f"{API}.STREAM.PURGE.KV_{subjects.services_bucket}"
    yield from (f"$KV.{subjects.config_bucket}.{key}" for key in role.config_keys)
    if role.launches:
        yield f"$KV.{subjects.services_bucket}.launcher.*"
    if role.settles:
        yield f"{API}.STREAM.PURGE.KV_{subjects.config_bucket}"
