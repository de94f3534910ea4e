"""Which versions of the weights exist, who is in the broadcast group, and who holds what. A pure state machine.

Guarantees, held by the property tests in tests/dcs/test_versions_story.py:
- A version number is handed out once: numbers only grow, over restarts of the DCS and of the trainer and over rollbacks.
- Asking again for the same weights (step, digest, publisher) gives the same version, so a publisher may retry blindly.
- A publisher that was replaced by a newer one is refused (Superseded); so is a version that a later one has overtaken.
- A group's epoch only grows. A group is used again only while its publisher and members are the same and nothing failed in it.
- A member that has not answered a broadcast by its deadline is out of the group until it joins again.

Time and the set of living replicas come in as arguments; what survives is the `State` (state.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from services.dcs.state import Group, Meeting, Member, State, Version
from shared.records import Received

KEPT_VERSIONS = 16
"""Versions whose course is remembered, beside pinned ones; older ones leave only their number behind."""
KEPT_PUBLISHERS = 16
"""Replaced publishers that are still recognised and refused."""
JOIN_S = 20.0
"""What joining a group may take: members that live join within moments; the rest of a broadcast's time is for sending."""
FAILED_GRACE_S = 5.0
"""After a failed broadcast its living members report within moments, so silence need not be borne up to the deadline."""


class VersionError(RuntimeError):
    """The request does not fit the state; the text says why. Repeating it unchanged is of no use."""


class UnknownVersion(VersionError):
    """No such version, or none any more."""


class Superseded(VersionError):
    """The publisher or the version has been replaced by a newer one."""


class Versions:
    """The rules over a State. The caller works on a copy and keeps it only once it is stored."""

    def __init__(self, state: State, *, timeout_s: float, heartbeat_ttl_s: float) -> None:
        self.state, self.timeout_s, self.heartbeat_ttl_s = state, timeout_s, heartbeat_ttl_s

    def get(self, version: int) -> Version:
        for known in reversed(self.state.versions):
            if known.version == version:
                return known
        raise UnknownVersion(
            f"version {version} is not known: {self.state.next_version - 1} was handed out last, and the last "
            f"{KEPT_VERSIONS} are remembered"
        )

    def announced(self) -> list[Version]:
        """Those that were announced, the newest first."""
        return [known for known in reversed(self.state.versions) if known.announced_at]

    def replicas(self) -> set[str]:
        """Everyone whose heartbeat matters here."""
        state = self.state
        members = [
            *state.members,
            *(member for known in state.versions if known.group for member in known.group.members),
        ]
        return {member.replica for member in members} | state.held.keys()

    def has_new_group(self, known: Version) -> bool:
        """Its group was formed for it. One that is used again is known to all in it: each took part in what came before."""
        earlier = (other for other in self.state.versions if other.version < known.version)
        return known.group is not None and all(
            other.group is None or other.group.epoch != known.group.epoch for other in earlier
        )

    # -- the publisher ------------------------------------------------------------------------------------------------

    def allocate(self, *, step: int, digest: str, reason: str, publisher: str, now: float) -> Version:
        """The version for these weights."""
        self._refuse_retired(publisher)
        state = self.state
        newest = next((known for known in reversed(state.versions) if known.publisher == publisher), None)
        if newest and newest.phase in ("allocated", "announced") and (newest.step, newest.digest) == (step, digest):
            return newest
        if state.publisher not in ("", publisher):
            state.retired = [*state.retired, state.publisher][-KEPT_PUBLISHERS:]
            state.group = None  # it died with its publisher
        state.publisher = publisher
        for known in state.versions:
            self._overtake(known, now)
        fresh = Version(state.next_version, step, digest, reason, publisher, now)
        state.next_version += 1
        pinned = [known for known in state.versions[: 1 - KEPT_VERSIONS] if known.version in state.pins]
        state.versions = [*pinned, *state.versions[1 - KEPT_VERSIONS :], fresh]
        return fresh

    def pin(self, version: int, wanted: bool) -> list[int]:
        """Keep the snapshot of an announced version, or no longer. Returns all that are kept so."""
        if wanted and not self.get(version).announced_at:
            raise VersionError(f"version {version} was never announced, so there is nothing to keep")
        self.state.pins = sorted({*self.state.pins, version} if wanted else {*self.state.pins} - {version})
        return self.state.pins

    def announce(
        self,
        version: int,
        *,
        publisher: str,
        epoch: int,
        senders: Sequence[Meeting],
        alive: Set[str] | None,
        now: float,
    ) -> Version:
        """The publisher is ready to send: form the group and start the clock of the deadline. Repeating changes nothing.

        `epoch` is the group that the publisher still has (0: none), `senders` where a new one would meet.
        `alive` None: not known, so nobody is put out.
        """
        known = self._own(version, publisher)
        if known.phase != "allocated":
            return known
        if alive is not None:
            self._put_out(member for member in self.state.members if self._missing(member, alive, now))
            self.state.held = {replica: held for replica, held in self.state.held.items() if replica in alive}
        known.group = self._form_group(epoch, senders)
        known.phase, known.announced_at, known.deadline = "announced", now, now + self.timeout_s
        return known

    def finish(
        self, version: int, *, publisher: str, ok: bool, error: str, seconds: dict[str, float], now: float
    ) -> Version:
        """The publisher's result of the broadcast. Repeating it changes nothing."""
        known = self._own(version, publisher)
        if known.phase == "allocated":
            raise VersionError(f"version {version} was not announced, so it has no result yet")
        if not known.result:
            known.result, known.error, known.seconds = ("ok" if ok else "failed"), error, seconds
            if not ok:
                self._break_group(known)
                known.deadline = min(known.deadline, now + FAILED_GRACE_S)
            self._settle(known)
        return known

    def wake(self, now: float) -> None:
        """A new process took over: what the last one's clock made of the future must not lie beyond what this one allows."""
        for known in self.state.versions:
            known.deadline = min(known.deadline, now + self.timeout_s)
        self.state.members = [replace(member, joined_at=min(member.joined_at, now)) for member in self.state.members]

    # -- the members --------------------------------------------------------------------------------------------------

    def join(self, replica: str, *, incarnation: str, world_size: int, now: float) -> Member:
        """Into the group from the next version on. Repeating it changes nothing."""
        if world_size < 1:
            raise VersionError(f"replica {replica}: world_size {world_size}, must be at least 1")
        member = Member(replica, incarnation, world_size, now)
        for known in self.state.members:
            if known == member:
                return known
        self._put_out(known for known in self.state.members if known.replica == replica)
        self.state.members = [*self.state.members, member]
        return member

    def leave(self, replica: str, incarnation: str, *, gone: bool = False) -> int:
        """Out of the group from the next version on. Returns the version that still waits for it, 0 if none does.

        A process group cannot lose a member half way, so whoever leaves in the middle of a broadcast should finish that one.
        `gone`: its engine is no more, so nobody is to wait for it.
        """
        leaving = [m for m in self.state.members if (m.replica, m.incarnation) == (replica, incarnation)]
        if gone:
            self._put_out(leaving)
        self.state.members = [member for member in self.state.members if member not in leaving]
        waiting = [
            known.version
            for known in self.state.versions
            if known.phase == "announced" and any(member in leaving for member in known.awaited())
        ]
        return max(waiting, default=0)

    def received(self, record: Received, seq: int) -> str:
        """Fold an answer from the weights stream. Returns what is wrong with it, '' if nothing is."""
        self.state.received_seq = max(self.state.received_seq, seq)
        try:
            known = self.get(record.version)
        except UnknownVersion as error:
            forgotten = record.version < min((known.version for known in self.state.versions), default=0)
            return "" if forgotten and record.ok else str(error)  # a newcomer whose engine took long to start
        right = record.digest == known.digest
        if record.ok and right:
            self.state.held[record.replica] = record.version
        if known.answers.get(record.replica, "failed") == "failed":
            known.answers[record.replica] = record.how if record.ok and right else "failed"
        if known.answers[record.replica] != "broadcast" and known.group and record.replica in known.group.ranks():
            self._break_group(known)
        self._settle(known)
        return "" if right or not record.ok else f"digest {record.digest} is not that of version {record.version}"

    def tick(self, now: float, alive: Set[str] | None) -> list[str]:
        """Leave behind whoever missed a deadline or died. Returns the replicas that were put out."""
        out: set[str] = set()
        for known in self.state.versions:
            if known.phase != "announced":
                continue
            late = now >= known.deadline
            lost = [m for m in known.awaited() if late or (alive is not None and self._missing(m, alive, now))]
            out |= {member.replica for member in lost}
            self._put_out(lost)
            if late and not known.result:
                known.result, known.error = "failed", "the publisher gave no result by the deadline"
                self._break_group(known)
            self._settle(known)
        return sorted(out)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _missing(self, member: Member, alive: Set[str], now: float) -> bool:
        """Its heartbeat is gone, and it has been here long enough to have shown one."""
        return member.replica not in alive and now - member.joined_at >= self.heartbeat_ttl_s

    def _refuse_retired(self, publisher: str) -> None:
        if publisher in self.state.retired:
            raise Superseded("this publisher was replaced by a newer trainer process and must stop")

    def _own(self, version: int, publisher: str) -> Version:
        self._refuse_retired(publisher)
        known = self.get(version)
        if known.publisher != publisher:
            raise Superseded(f"version {version} belongs to another publisher")
        if known.phase == "abandoned":
            raise Superseded(f"version {version} was overtaken by a later one before it was announced")
        return known

    def _form_group(self, epoch: int, senders: Sequence[Meeting]) -> Group | None:
        state = self.state
        members = sorted(state.members, key=lambda member: member.replica)
        if not members:
            state.group = None
        elif state.group is None or state.group.epoch != epoch or state.group.members != members:
            state.epoch += 1
            state.group = Group(state.epoch, state.publisher, list(senders), members)
        return state.group

    def _overtake(self, known: Version, now: float) -> None:
        """A later version is asked for: nobody waits for this one any more."""
        if known.phase == "allocated":
            known.phase = "abandoned"
        elif known.phase == "announced":
            if not known.clean():
                self._break_group(known)
                self._put_out(known.awaited() if now >= known.deadline else [])
            known.phase = "settled"

    def _break_group(self, known: Version) -> None:
        """Something failed in its process group, which is then of no further use to anybody."""
        if self.state.group and known.group and self.state.group.epoch == known.group.epoch:
            self.state.group = None

    def _put_out(self, members: Iterable[Member]) -> None:
        out = list(members)
        self.state.members = [member for member in self.state.members if member not in out]
        for known in self.state.versions:
            left = [member for member in known.awaited() if member in out]
            if known.phase == "announced" and left:
                known.dropped = sorted({*known.dropped, *(member.replica for member in left)})
                self._break_group(known)
                self._settle(known)

    def _settle(self, known: Version) -> None:
        # Asked at each of a thousand answers, so the cheap question first.
        members = len(known.group.members) if known.group else 0
        told = len(known.answers) + len(known.dropped)
        if known.phase == "announced" and known.result and told >= members and not known.awaited():
            known.phase = "settled"
