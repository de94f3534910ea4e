"""The rules of versions and groups: the stories that matter, one by one. Random ones: test_versions_story.py."""

from __future__ import annotations

import pytest

from services.dcs.state import Meeting, State, Version
from services.dcs.versions import (
    FAILED_GRACE_S,
    Superseded,
    UnknownVersion,
    VersionError,
    Versions,
)
from shared.records import Received

TIMEOUT = 60.0
TTL = 15.0


def rules() -> Versions:
    return Versions(State(), timeout_s=TIMEOUT, heartbeat_ttl_s=TTL)


def allocate(
    v: Versions, step: int = 0, publisher: str = "p", digest: str | None = None, now: float = 100.0
) -> Version:
    return v.allocate(step=step, digest=digest or f"d{step}", reason="update", publisher=publisher, now=now)


def announce(
    v: Versions, version: int, publisher: str = "p", epoch: int = 0, alive: set[str] | None = None, now: float = 100.0
) -> Version:
    return v.announce(
        version, publisher=publisher, epoch=epoch, senders=[Meeting("h", 7000 + version)], alive=alive, now=now
    )


def finish(v: Versions, version: int, ok: bool = True, publisher: str = "p", now: float = 101.0) -> Version:
    return v.finish(version, publisher=publisher, ok=ok, error="" if ok else "broken", seconds={}, now=now)


def answer(
    v: Versions, version: int, replica: str, how: str = "broadcast", ok: bool = True, digest: str | None = None
) -> str:
    digest = digest or v.get(version).digest
    record = Received(replica, version, 0, digest, how, {}, ok, "" if ok else "broken", 0.0)  # type: ignore[arg-type]
    return v.received(record, v.state.received_seq + 1)


def sent(v: Versions, step: int, epoch: int = 0, members: tuple[str, ...] = ("a", "b")) -> Version:
    """A version that went well."""
    version = allocate(v, step).version
    told = announce(v, version, epoch=epoch)
    finish(v, version)
    for replica in members:
        answer(v, version, replica)
    return told


def with_members(*replicas: str) -> Versions:
    v = rules()
    for replica in replicas:
        v.join(replica, incarnation=f"{replica}1", world_size=1, now=0.0)
    return v


def test_a_version_without_members_is_pulled_only() -> None:
    v = rules()
    version = allocate(v)
    assert announce(v, version.version).group is None
    assert finish(v, version.version).phase == "settled"


def test_asking_again_gives_the_same_version_until_it_is_settled() -> None:
    v = with_members("a")
    first = allocate(v, 3)
    assert allocate(v, 3).version == first.version
    announce(v, first.version)
    assert allocate(v, 3).version == first.version
    finish(v, first.version)
    answer(v, first.version, "a")
    assert allocate(v, 3).version == first.version + 1


def test_the_same_step_with_other_weights_is_another_version() -> None:
    v = rules()
    assert allocate(v, 3, digest="x").version != allocate(v, 3, digest="y").version


def test_numbers_go_on_after_a_restart_and_a_rollback() -> None:
    v = with_members("a")
    last = [sent(v, step, members=("a",)).version for step in (5, 6, 7)][-1]
    v = Versions(State.load(v.state.dump()), timeout_s=TIMEOUT, heartbeat_ttl_s=TTL)
    assert allocate(v, 5, publisher="trainer after the crash").version == last + 1


def test_ranks_follow_the_engines_sizes() -> None:
    v = rules()
    for replica, size in (("c", 1), ("a", 2), ("b", 4)):
        v.join(replica, incarnation="i", world_size=size, now=0.0)
    group = announce(v, allocate(v).version).group
    assert group is not None
    assert (group.ranks(), group.world_size) == ({"a": 1, "b": 3, "c": 7}, 8)


def test_a_group_is_used_again_while_nothing_changes() -> None:
    v = with_members("a", "b")
    first, second = sent(v, 0).group, sent(v, 1, epoch=1).group
    assert first is not None
    assert first == second


def test_a_publisher_that_lost_its_group_gets_a_new_one() -> None:
    v = with_members("a", "b")
    sent(v, 0)
    group = sent(v, 1, epoch=0).group
    assert group is not None
    assert (group.epoch, group.senders) == (2, [Meeting("h", 7002)])


def test_a_newcomer_is_in_from_the_next_version_on() -> None:
    v = with_members("a")
    version = allocate(v).version
    announce(v, version)
    v.join("b", incarnation="b1", world_size=1, now=100.0)
    finish(v, version)
    answer(v, version, "a")
    assert v.get(version).phase == "settled"
    group = announce(v, allocate(v, 1).version, epoch=1).group
    assert group is not None
    assert (group.epoch, list(group.ranks())) == (2, ["a", "b"])


def test_who_is_silent_at_the_deadline_is_left_behind_and_may_come_back() -> None:
    v = with_members("a", "b")
    version = allocate(v).version
    announce(v, version, now=100.0)
    finish(v, version)
    answer(v, version, "a")
    assert v.tick(100.0 + TIMEOUT - 1, None) == []
    assert v.get(version).phase == "announced"
    assert v.tick(100.0 + TIMEOUT, None) == ["b"]
    assert (v.get(version).phase, v.get(version).dropped) == ("settled", ["b"])
    group = announce(v, allocate(v, 1).version, epoch=1).group
    assert group is not None
    assert (group.epoch, list(group.ranks())) == (2, ["a"])
    v.join("b", incarnation="b1", world_size=1, now=200.0)
    assert v.tick(1000.0, None) == ["a"]  # of the second version; the first one's deadline is over and done with
    assert [member.replica for member in v.state.members] == ["b"]


def test_a_failed_broadcast_is_settled_once_the_living_have_answered() -> None:
    v = with_members("a", "b")
    version = allocate(v).version
    announce(v, version, now=100.0)
    finish(v, version, ok=False, now=101.0)
    assert v.state.group is None
    answer(v, version, "a", ok=False)
    assert v.tick(101.0 + FAILED_GRACE_S, None) == ["b"]
    assert v.get(version).phase == "settled"
    answer(v, version, "a", how="snapshot")
    assert v.get(version).answers["a"] == "snapshot"
    group = announce(v, allocate(v, 1).version, epoch=1).group
    assert group is not None
    assert (group.epoch, list(group.ranks())) == (2, ["a"])


def test_one_members_failure_ends_the_group_but_not_the_membership() -> None:
    v = with_members("a", "b")
    version = allocate(v).version
    announce(v, version)
    answer(v, version, "a", ok=False)
    finish(v, version)
    answer(v, version, "b")
    assert v.get(version).phase == "settled"
    assert not v.get(version).clean()
    group = announce(v, allocate(v, 1).version, epoch=1).group
    assert group is not None
    assert (group.epoch, list(group.ranks())) == (2, ["a", "b"])


def test_a_dead_member_is_not_waited_for() -> None:
    v = with_members("a", "b")
    version = allocate(v).version
    announce(v, version, alive={"a", "b"})
    finish(v, version)
    answer(v, version, "a")
    assert v.tick(102.0, {"a"}) == ["b"]
    assert v.get(version).phase == "settled"


def test_a_member_without_heartbeat_is_out_at_the_next_version_unless_it_just_joined() -> None:
    v = with_members("a", "b")
    v.join("new", incarnation="n1", world_size=1, now=100.0 - TTL / 2)
    group = announce(v, allocate(v).version, alive={"a"}, now=100.0).group
    assert group is not None
    assert list(group.ranks()) == ["a", "new"]


def test_a_restarted_replica_is_another_member() -> None:
    v = with_members("a", "b")
    sent(v, 0)
    version = allocate(v, 1).version
    announce(v, version, epoch=1)
    finish(v, version)
    answer(v, version, "b")
    v.join("a", incarnation="a2", world_size=1, now=102.0)
    assert (v.get(version).dropped, v.get(version).phase) == (["a"], "settled")
    assert v.tick(1000.0, None) == []
    group = announce(v, allocate(v, 2).version, epoch=1).group
    assert group is not None
    assert (group.epoch, group.members[0].incarnation) == (2, "a2")


def test_who_leaves_in_a_broadcast_is_told_to_finish_it() -> None:
    v = with_members("a", "b")
    sent(v, 0)
    assert v.leave("a", "a1") == 0
    v.join("a", incarnation="a1", world_size=1, now=102.0)
    version = allocate(v, 1).version
    announce(v, version, epoch=1)
    assert v.leave("a", "another process") == 0
    assert v.leave("a", "a1") == version
    assert [member.replica for member in v.state.members] == ["b"]
    assert [member.replica for member in v.get(version).awaited()] == ["a", "b"]


def test_nobody_waits_for_a_member_whose_engine_is_gone() -> None:
    v = with_members("a", "b")
    version = allocate(v).version
    announce(v, version)
    assert v.leave("a", "a1", gone=True) == 0
    assert (v.get(version).dropped, [m.replica for m in v.get(version).awaited()]) == (["a"], ["b"])


def test_a_replaced_publisher_is_refused() -> None:
    v = with_members("a")
    version = allocate(v, 4, publisher="old").version
    allocate(v, 3, publisher="new")
    for call in (
        lambda: allocate(v, 5, publisher="old"),
        lambda: announce(v, version, publisher="old"),
        lambda: finish(v, version, publisher="old"),
    ):
        with pytest.raises(Superseded, match="replaced by a newer trainer"):
            call()
    assert v.get(version).phase == "abandoned"


def test_an_overtaken_version_cannot_be_announced() -> None:
    v = rules()
    early, late = allocate(v, 1).version, allocate(v, 2).version
    with pytest.raises(Superseded, match="overtaken"):
        announce(v, early)
    announce(v, late)


def test_a_new_trainer_meets_its_members_anew() -> None:
    v = with_members("a")
    sent(v, 0, members=("a",))
    version = allocate(v, 0, publisher="next").version
    group = announce(v, version, publisher="next", epoch=1).group  # whatever epoch it believes in
    assert group is not None
    assert (group.epoch, group.publisher) == (2, "next")


def test_another_digest_is_no_answer() -> None:
    v = with_members("a")
    version = allocate(v).version
    announce(v, version)
    assert "is not that of version" in answer(v, version, "a", digest="other")
    assert v.state.held == {}
    assert v.get(version).answers == {"a": "failed"}


def test_errors_name_the_version() -> None:
    v = rules()
    with pytest.raises(UnknownVersion, match="version 7 is not known: 0 was handed out last"):
        announce(v, 7)
    with pytest.raises(VersionError, match="was not announced"):
        finish(v, allocate(v).version)
    with pytest.raises(VersionError, match="world_size 0"):
        v.join("a", incarnation="a1", world_size=0, now=0.0)


@pytest.mark.parametrize("jump", [-1e6, 1e6], ids=["back", "forward"])
def test_a_process_that_begins_with_another_clock_neither_waits_for_ever_nor_reuses_a_number(jump: float) -> None:
    v = rules()
    v.join("a", incarnation="a1", world_size=1, now=100.0)
    first = allocate(v)
    announce(v, first.version)
    now = 100.0 + jump
    v.wake(now)
    assert v.get(first.version).deadline <= now + TIMEOUT
    v.tick(now + TIMEOUT, alive=None)
    assert v.get(first.version).phase == "settled"
    v.join("b", incarnation="b1", world_size=1, now=now)
    v.wake(now - 1e6)
    version = allocate(v, step=1, now=now - 1e6).version
    assert version == first.version + 1
    announce(v, version, now=now - 1e6)
    assert v.tick(now - 1e6 + TTL, alive=set()) == ["b"], (
        "it is missed one time to live from now on, not from its future"
    )
