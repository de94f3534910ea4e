"""The streams as data: who may discard what, and whether all that can be on the way fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import wire
from shared.config import ConfigError
from shared.records import Receipt, ints
from shared.streams import (
    MESSAGE_LIMIT,
    RECEIPT_BYTES,
    SPECS,
    allocate,
    consumer_config,
    group_bytes,
    needs,
    stream_config,
    stream_of,
)
from shared.subjects import STREAMS, Subjects
from tests.shared.runs import make_config


def test_every_stream_of_the_run_is_defined_once() -> None:
    subjects = Subjects("run")
    assert tuple(SPECS) == STREAMS
    configs = [stream_config(subjects, spec, 1) for spec in SPECS.values()]
    taken = [subject for config in configs for subject in config["subjects"]]
    assert len(set(taken)) == len(taken) == len(STREAMS) + 1, "decisions and reports are both receipts"
    assert len({config["name"] for config in configs}) == len(STREAMS)
    assert sum(spec.share for spec in SPECS.values()) == pytest.approx(1.0)


def test_a_queue_never_discards_and_a_log_never_blocks() -> None:
    assert {name for name, spec in SPECS.items() if spec.retention == "workqueue"} == {
        "prompts",
        "rewards",
        "teacher",
        "reference",
        "advantages",
    }
    for spec in SPECS.values():
        if spec.name not in ("blobs", "receipts"):
            assert (spec.discard == "new") == (spec.retention == "workqueue")
    assert SPECS["blobs"].discard == "new", "a queue's message must find its payload"
    assert SPECS["receipts"].discard == "new", "the ledger is no ledger without its first entries"


def test_stream_of_every_subject() -> None:
    s = Subjects("run")
    expected = {
        s.prompts: "prompts",
        s.partial("0-7.1", 3): "partials",
        s.reward_requests: "rewards",
        s.trajectory("0-7.1"): "trajectories",
        s.stage("teacher"): "teacher",
        s.stage("reference"): "reference",
        s.advantages: "advantages",
        s.receipts: "receipts",
        s.announced: "weights",
        s.received: "weights",
        s.metrics("trainer", "0"): "metrics",
        s.events("dcs"): "events",
        s.dead("reward"): "dead",
        s.blob("ab", 0): "blobs",
        s.archived("ab", "*"): "archive",
    }
    assert {subject: stream_of(s, subject) for subject in expected} == expected
    assert set(expected.values()) == set(STREAMS)
    for wrong in ("other.prompts", "run.nothing", "run", ""):
        with pytest.raises(ValueError, match="no subject of run 'run'"):
            stream_of(s, wrong)


@given(
    steps=st.integers(1, 1000),
    groups=st.integers(1, 64),
    samples=st.integers(2, 32),
    tokens=st.integers(1, 8000),
    staleness=st.integers(0, 4),
    every=st.integers(1, 20),
    max_bytes=st.integers(64 << 20, 1 << 40),
)
def test_what_must_fit_fits_or_is_refused(
    steps: int, groups: int, samples: int, tokens: int, staleness: int, every: int, max_bytes: int
) -> None:
    config = make_config(
        "run",
        steps=steps,
        groups_per_step=groups,
        samples_per_group=samples,
        max_staleness=staleness,
        sampling={"max_new_tokens": tokens},
        trainer={"checkpoint": {"every": every}, "micro_batch_tokens": 16384},
        broker={"max_bytes": max_bytes},
    )
    needed = needs(config)
    try:
        sizes = allocate(config)
    except ConfigError as error:
        enough = int(str(error).partition("at least ")[2].partition(",")[0])
        raised = config.model_copy(update={"broker": config.broker.model_copy(update={"max_bytes": enough})})
        assert enough > max_bytes
        sizes = allocate(raised)
        max_bytes = enough
    assert all(sizes[name] >= need for name, need in needed.items())
    assert sum(sizes.values()) <= max_bytes
    assert min(sizes.values()) > MESSAGE_LIMIT // 10
    unsaved = (config.slots + groups * every) * group_bytes(config)
    assert sizes["blobs" if group_bytes(config) > MESSAGE_LIMIT else "advantages"] >= unsaved


def test_a_receipt_is_as_small_as_assumed() -> None:
    receipt = Receipt(
        "trained", "12-1234567.3", 10**7, 10**7, 10**5, 10**5, "x" * 40, "host-rollout-123", ints(range(64))
    )
    assert len(wire.encode(receipt)) <= RECEIPT_BYTES + 4 * 64


def test_deliveries_are_bounded_by_the_reader_and_nothing_else() -> None:
    config = consumer_config("rollout", "run.prompts", 1.5)
    assert config["max_deliver"] == config["max_ack_pending"] == -1
    assert config["ack_wait"] == 1_500_000_000
