"""The rules of versions and groups over random stories: who publishes, joins, hangs, answers late; a DCS that is killed."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from services.dcs.state import Meeting, State
from services.dcs.versions import (
    KEPT_VERSIONS,
    Superseded,
    UnknownVersion,
    VersionError,
    Versions,
)
from shared.records import Received
from tests.dcs.test_versions import TIMEOUT, TTL, rules

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
