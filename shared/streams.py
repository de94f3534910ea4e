"""The streams of a run as data, made from its config: retention, what happens when one is full, and how much it may hold.

Guarantees: where a loss would matter a full stream refuses (`discard: new`) and the publisher waits. `allocate` gives each
stream first what the credits say it can need, so that the trajectory log cannot discard what nobody has read, the advantages
queue holds all that a checkpoint has yet to cover, and the ledger keeps every receipt of the run (should it fill up all the
same, writers wait: a restart needs the first receipts as much as the last); the rest of broker.max_bytes is shared out. A run
whose needs do not fit is refused before it starts. tests/shared/test_streams.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shared import columns
from shared.config import ConfigError, RunConfig
from shared.subjects import STREAMS, Subjects

NS = 1_000_000_000
DUPLICATE_WINDOW_S = 600
"""Longer than the longest outage of a publisher: a message sent again within it is recognised by its id."""
DAY_S = 86_400
RECEIPT_BYTES = 512
RECEIPTS_PER_GROUP = 4
"""Issued and trained, and as much again for groups that were dropped and issued anew."""
MAX_CONSUMERS = 100_000
"""Each replica reads the weights stream by a consumer of its own. nats-server 2.15 allows a stream a thousand unless it says
another number, and -1 is none."""
MESSAGE_LIMIT = 900 << 10
"""A larger payload goes to the blob stream. Below the broker's default max_payload of 1 MiB, headers included."""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    name: str
    """One of subjects.STREAMS."""
    retention: Literal["workqueue", "limits"]
    discard: Literal["new", "old"]
    share: float
    """Of what broker.max_bytes leaves beyond the needs of all streams."""
    max_age_s: int = 0
    """0: for ever."""
    per_subject: int = -1


SPECS = {
    spec.name: spec
    for spec in (
        StreamSpec("prompts", "workqueue", "new", 0.04),
        StreamSpec("partials", "limits", "old", 0.04, max_age_s=DAY_S, per_subject=1),
        StreamSpec("rewards", "workqueue", "new", 0.11),
        StreamSpec("trajectories", "limits", "old", 0.16),
        StreamSpec("teacher", "workqueue", "new", 0.01),
        StreamSpec("reference", "workqueue", "new", 0.01),
        StreamSpec("advantages", "workqueue", "new", 0.17),
        StreamSpec("receipts", "limits", "new", 0.04),
        StreamSpec("weights", "limits", "old", 0.01),
        StreamSpec("metrics", "limits", "old", 0.05, max_age_s=7 * DAY_S),
        StreamSpec("events", "limits", "old", 0.03, max_age_s=30 * DAY_S),
        StreamSpec("dead", "limits", "old", 0.03),
        # Payloads above MESSAGE_LIMIT. Those of work queues go when their message is acked, those of logs when room is needed.
        StreamSpec("blobs", "limits", "new", 0.20, per_subject=1),
        StreamSpec("archive", "limits", "old", 0.10, per_subject=1),
    )
}
assert tuple(SPECS) == STREAMS


def stream_of(subjects: Subjects, subject: str) -> str:
    """The stream (one of STREAMS) that takes `subject`."""
    run, _, rest = subject.partition(".")
    name = rest.partition(".")[0]
    if run != subjects.run or name not in SPECS:
        raise ValueError(f"{subject!r} is no subject of run {subjects.run!r}")
    return name


def stream_config(subjects: Subjects, spec: StreamSpec, max_bytes: int, replicas: int = 1) -> dict[str, Any]:
    """The body of JetStream's STREAM.CREATE."""
    return {
        "name": subjects.stream(spec.name),
        "subjects": subjects.taken_by(spec.name),
        "retention": spec.retention,
        "discard": spec.discard,
        "storage": "file",
        "num_replicas": replicas,
        "max_bytes": max_bytes,
        "max_age": spec.max_age_s * NS,
        "max_msgs": -1,
        "max_msgs_per_subject": spec.per_subject,
        "max_consumers": MAX_CONSUMERS,
        "duplicate_window": DUPLICATE_WINDOW_S * NS,
        "allow_direct": True,
        "allow_msg_ttl": True,
    }


def consumer_config(name: str, filter_subject: str, ack_wait_s: float) -> dict[str, Any]:
    """A durable pull consumer. The number of deliveries is bounded by the reader (it knows the reason), so not here."""
    return {
        "name": name,
        "durable_name": name,
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": int(ack_wait_s * NS),
        "max_deliver": -1,
        "max_ack_pending": -1,
        "max_waiting": 4096,
        "filter_subject": filter_subject,
        "replay_policy": "instant",
    }


def group_bytes(config: RunConfig) -> int:
    """The largest message of one group: ids, log-probabilities, advantages, mask and columns of every token, and the texts."""
    tokens = config.samples_per_group * config.sampling.max_new_tokens
    added = 4 * sum(columns.travelling(config).values())
    return tokens * (4 + 4 + 4 + 1 + 5 + added) + config.sampling.max_prompt_tokens * (4 + 5) + 8192


def needs(config: RunConfig) -> dict[str, int]:
    """Bytes that streams must be able to hold, by the credits: see docs/staleness.md for `slots`."""
    on_the_way = config.slots
    unsaved = on_the_way + config.groups_per_step * config.trainer.checkpoint.every
    size = group_bytes(config)
    receipts = config.steps * config.groups_per_step * RECEIPTS_PER_GROUP
    needed = {
        "prompts": on_the_way * (config.sampling.max_prompt_tokens * 10 + 4096),
        "receipts": receipts * (RECEIPT_BYTES + 4 * config.samples_per_group),
    }
    if size > MESSAGE_LIMIT:
        return needed | {"blobs": (on_the_way + unsaved) * size, "archive": on_the_way * size}
    needed |= dict.fromkeys(columns.stages(config), on_the_way * size)
    return needed | {"rewards": on_the_way * size, "trajectories": on_the_way * size, "advantages": unsaved * size}


def allocate(config: RunConfig) -> dict[str, int]:
    """max_bytes of every stream. ConfigError if what must fit does not."""
    needed = needs(config)
    rest = config.broker.max_bytes - sum(needed.values())
    if rest < config.broker.max_bytes // 4:
        largest = max(needed, key=lambda name: needed[name])
        raise ConfigError(
            f"broker.max_bytes: {config.broker.max_bytes} is too small: the run can have {sum(needed.values())} bytes in its "
            f"streams at once ({needed[largest]} of them in {largest}). Set it to at least {sum(needed.values()) * 4 // 3 + 1}, "
            "or lower trainer.checkpoint.every, groups_per_step, samples_per_group, sampling.max_new_tokens or steps"
        )
    return {name: needed.get(name, 0) + int(rest * spec.share) for name, spec in SPECS.items()}
