"""The rules of versions and groups: the stories that matter one by one, then random ones over restarts."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from services.dcs.state import Meeting, State, Version
from services.dcs.versions import (
    FAILED_GRACE_S,
    KEPT_VERSIONS,
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


REPLICAS = ["a", "b", "c"]


class Story(RuleBasedStateMachine):
    """Publishers that retry and are replaced, members that come, go, hang and answer late, a DCS that is killed."""

    versions = Bundle("versions")

    @initialize()
    def begin(self) -> None:
        self.now = 1000.0
        self.v = rules()
        self.publisher = 0
        self.numbers: dict[tuple[int, str, int], int] = {}
        self.highest = self.epoch = self.told = 0
        self.groups: dict[int, tuple[object, ...]] = {}

    @rule(target=versions, step=st.integers(0, 3), digest=st.sampled_from("xy"))
    def publish(self, step: int, digest: str) -> object:
        publisher = f"p{self.publisher}"
        before = self.v.state.next_version
        version = self.v.allocate(step=step, digest=digest, reason="", publisher=publisher, now=self.now)
        again = self.v.allocate(step=step, digest=digest, reason="", publisher=publisher, now=self.now)
        assert again.version == version.version
        if version.version == before:
            assert version.version > self.highest
            self.highest = version.version
            return (version.version, publisher)
        return multiple()

    @rule(told=versions, lost=st.booleans(), alive=st.sets(st.sampled_from(REPLICAS)) | st.none())
    def announce(self, told: tuple[int, str], lost: bool, alive: set[str] | None) -> None:
        version, publisher = told
        epoch = 0 if lost or self.v.state.group is None else self.v.state.group.epoch
        try:
            before = self.v.get(version).phase
            known = self.v.announce(
                version, publisher=publisher, epoch=epoch, senders=[Meeting("h", version)], alive=alive, now=self.now
            )
        except (Superseded, UnknownVersion):
            return
        if before != "allocated":
            return
        assert version > self.told, "announced out of order"
        self.told = version
        if known.group is not None:
            fixed = (
                known.group.publisher,
                known.group.senders,
                [(m.replica, m.incarnation) for m in known.group.members],
            )
            assert known.group.epoch >= self.epoch
            assert known.group.publisher == publisher
            assert self.groups.setdefault(known.group.epoch, fixed) == fixed, "an epoch is one group"
            alike = [one for one in self.v.state.versions if one.group and one.group.epoch == known.group.epoch]
            assert all(one.clean() for one in alike if one is not known), "used again, though somebody took no part"
            assert self.v.has_new_group(known) == (known.group.epoch > self.epoch)
            self.epoch = known.group.epoch
            ranks = sorted(known.group.ranks().values())
            assert ranks[0] == 1

    @rule(told=versions, ok=st.booleans())
    def finish(self, told: tuple[int, str], ok: bool) -> None:
        version, publisher = told
        try:
            known = self.v.finish(version, publisher=publisher, ok=ok, error="", seconds={}, now=self.now)
        except VersionError:
            return
        if known.result == "failed" and known.group and self.v.state.group:
            assert self.v.state.group.epoch != known.group.epoch, "a broken group is not used again"

    @rule(
        told=versions,
        replica=st.sampled_from(REPLICAS),
        ok=st.booleans(),
        how=st.sampled_from(["broadcast", "snapshot"]),
    )
    def answer(self, told: tuple[int, str], replica: str, ok: bool, how: str) -> None:
        try:
            digest = self.v.get(told[0]).digest
        except UnknownVersion:
            digest = ""
        record = Received(replica, told[0], 0, digest, how, {}, ok, "", self.now)  # type: ignore[arg-type]
        self.v.received(record, self.v.state.received_seq + 1)
        if ok and digest:
            assert self.v.state.held[replica] == told[0]

    @rule(replica=st.sampled_from(REPLICAS), incarnation=st.sampled_from("12"), size=st.integers(1, 2))
    def join(self, replica: str, incarnation: str, size: int) -> None:
        self.v.join(replica, incarnation=incarnation, world_size=size, now=self.now)
        assert [m.replica for m in self.v.state.members].count(replica) == 1

    @rule(replica=st.sampled_from(REPLICAS), incarnation=st.sampled_from("12"), gone=st.booleans())
    def leave(self, replica: str, incarnation: str, gone: bool) -> None:
        self.v.leave(replica, incarnation, gone=gone)
        assert (replica, incarnation) not in [(m.replica, m.incarnation) for m in self.v.state.members]

    @rule(seconds=st.sampled_from([0.1, 6.0, 61.0]), alive=st.sets(st.sampled_from(REPLICAS)) | st.none())
    def time_passes(self, seconds: float, alive: set[str] | None) -> None:
        self.now += seconds
        self.v.tick(self.now, alive)
        for known in self.v.state.versions:
            assert known.phase != "announced" or self.now < known.deadline, "nothing is waited for beyond its deadline"

    @rule()
    def trainer_restarts(self) -> None:
        self.publisher += 1

    @rule()
    def dcs_restarts(self) -> None:
        self.v = Versions(State.load(self.v.state.dump()), timeout_s=TIMEOUT, heartbeat_ttl_s=TTL)

    @rule(told=consumes(versions))
    def forget(self, told: tuple[int, str]) -> None:
        """A request that never comes."""

    @invariant()
    def holds(self) -> None:
        state = self.v.state
        numbers = [known.version for known in state.versions]
        assert numbers == sorted(set(numbers))
        assert len(numbers) <= KEPT_VERSIONS
        assert state.next_version > max(numbers, default=0)
        assert sum(known.phase in ("allocated", "announced") for known in state.versions) <= 1
        assert all(not known.awaited() for known in state.versions if known.phase == "settled" and known.clean())


Story.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStory = Story.TestCase


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
