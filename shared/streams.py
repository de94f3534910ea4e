"""The streams of a run as data, made from its config: retention, what happens when one is full, and its share of the disk.

Guarantees: where a loss would matter a full stream refuses (`discard: new`) and the publisher waits; the shares are checked
against the credits before anything is created (`check_capacity`), so that the trajectory log cannot discard what nobody has
read and the advantages queue can hold all that a checkpoint has yet to cover. tests/shared/test_streams.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from shared.config import ConfigError, RunConfig
from shared.subjects import STREAMS, Subjects

NS = 1_000_000_000
DUPLICATE_WINDOW_S = 600
"""Longer than the longest outage of a publisher: a message sent again within it is recognised by its id."""
DAY_S = 86_400
MESSAGE_LIMIT = 900 << 10
"""A larger payload goes to the blob stream. Below the broker's default max_payload of 1 MiB, headers included."""


@dataclass(frozen=True, slots=True)
class StreamSpec:
    name: str
    """One of subjects.STREAMS."""
    retention: Literal["workqueue", "limits"]
    discard: Literal["new", "old"]
    share: float
    """Of broker.max_bytes."""
    max_age_s: int = 0
    """0: for ever."""
    per_subject: int = -1


SPECS = {
    spec.name: spec
    for spec in (
        StreamSpec("prompts", "workqueue", "new", 0.04),
        StreamSpec("rewards", "workqueue", "new", 0.14),
        StreamSpec("trajectories", "limits", "old", 0.20),
        StreamSpec("advantages", "workqueue", "new", 0.20),
        StreamSpec("receipts", "limits", "old", 0.05),
        StreamSpec("weights", "limits", "old", 0.02),
        StreamSpec("metrics", "limits", "old", 0.05, max_age_s=7 * DAY_S),
        StreamSpec("events", "limits", "old", 0.03, max_age_s=30 * DAY_S),
        StreamSpec("dead", "limits", "old", 0.03),
        StreamSpec("blobs", "limits", "new", 0.24, per_subject=1),
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
        "subjects": [subjects.wildcard(spec.name)],
        "retention": spec.retention,
        "discard": spec.discard,
        "storage": "file",
        "num_replicas": replicas,
        "max_bytes": int(max_bytes * spec.share),
        "max_age": spec.max_age_s * NS,
        "max_msgs": -1,
        "max_msgs_per_subject": spec.per_subject,
        "max_consumers": -1,
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
    """The largest message of one group: ids, log-probabilities, advantages and mask of every token, and the texts."""
    tokens = config.samples_per_group * config.sampling.max_new_tokens
    return tokens * (4 + 4 + 4 + 1 + 5) + config.sampling.max_prompt_tokens * (4 + 5) + 8192


def check_capacity(config: RunConfig) -> None:
    """ConfigError if the streams could not hold what may be on the way at once."""
    on_the_way = config.slots
    unsaved = on_the_way + config.groups_per_step * config.trainer.checkpoint.every
    size = group_bytes(config)
    needs = {"rewards": on_the_way * size, "trajectories": on_the_way * size, "advantages": unsaved * size}
    if size > MESSAGE_LIMIT:
        needs = {"blobs": 2 * (2 * on_the_way + unsaved) * size}
    total = max(int(need / SPECS[name].share) for name, need in needs.items())
    if total > config.broker.max_bytes:
        raise ConfigError(
            f"broker.max_bytes: {config.broker.max_bytes} is too small: up to {unsaved} groups of {size} bytes can be on the way "
            f"or wait for a checkpoint. Set it to at least {total}, or lower trainer.checkpoint.every, groups_per_step, "
            "samples_per_group or sampling.max_new_tokens"
        )
