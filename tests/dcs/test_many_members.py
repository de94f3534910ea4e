"""What the DCS keeps and folds when there are a thousand members."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from services.dcs.state import Meeting, State
from services.dcs.versions import KEPT_VERSIONS, Versions
from shared.records import Received
from shared.wire import WireError, encode

MEMBERS = 1000
BROKER_LIMIT = 1 << 20
"""nats-server's default max_payload."""


def test_the_state_of_a_thousand_members_is_one_small_message() -> None:
    rules = Versions(State(), timeout_s=60.0, heartbeat_ttl_s=15.0)
    for number in range(MEMBERS):
        rules.join(f"rollout-{number}", incarnation=uuid.uuid4().hex, world_size=1, now=0.0)
    epoch = 0
    for step in range(KEPT_VERSIONS):
        version = rules.allocate(step=step, digest="d", reason="step", publisher="p", now=0.0).version
        known = rules.announce(version, publisher="p", epoch=epoch, senders=[Meeting("h", 1)], alive=None, now=0.0)
        assert known.group is not None
        epoch = known.group.epoch
        rules.finish(version, publisher="p", ok=True, error="", seconds={}, now=0.0)
        for number in range(MEMBERS):
            assert known.phase == "announced"
            record = Received(f"rollout-{number}", version, step, "d", "broadcast", {}, True, "", 0.0)
            assert rules.received(record, number) == ""
        assert known.phase == "settled"
    assert epoch == 1, "the group is used again"
    late = Received("newcomer", 1, 0, "d", "snapshot", {}, True, "", 0.0)
    newer = rules.allocate(step=KEPT_VERSIONS, digest="d", reason="step", publisher="p", now=0.0).version
    assert rules.received(late, MEMBERS) == "", "what it started on is forgotten by now, and that is no fault"
    assert "is not known" in rules.received(replace(late, version=newer + 1), MEMBERS)
    stored = rules.state.dump()
    assert len(stored) < BROKER_LIMIT / 4
    assert State.load(stored) == rules.state


def test_a_state_of_another_release_is_refused_with_the_way_out() -> None:
    with pytest.raises(WireError, match="delete the key: version numbers go on"):
        State.load(encode(State()))
