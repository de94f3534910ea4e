"""What the DCS knows and must not forget: members, groups, the course of each version. Data, and the form in which it is stored.

The rules over it are versions.py. The DCS stores a `State` under KV key `dcs` after every change and before it answers. It has no
tensor lists: those lie with the snapshots, so that the state stays small. tests/dcs/test_versions.py, test_many_members.py.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import Literal

from shared.wire import WireError, decode, encode, schema

STATE_KEY = "dcs"
"""Where the state lies in the run's config bucket."""
COMPRESSION = 1


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that takes part in broadcasts."""

    replica: str
    incarnation: str
    """Its process: a replica that was restarted under its old name is another member."""
    world_size: int
    """Ranks that its engine brings into the group."""
    joined_at: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a sender's TCPStore is: there it meets the members."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Group:
    """Who takes part in the broadcasts of one epoch. Each sender has a process group of its own with all members, and is its
    rank 0: one sender for the whole model, or one for each pipeline stage of the trainer."""

    epoch: int
    publisher: str
    senders: list[Meeting]
    members: list[Member]

    @property
    def world_size(self) -> int:
        """Of each of its process groups."""
        return 1 + sum(member.world_size for member in self.members)

    def ranks(self) -> dict[str, int]:
        """The first rank of each member's engine."""
        ranks, rank = {}, 1
        for member in self.members:
            ranks[member.replica] = rank
            rank += member.world_size
        return ranks


@dataclass(slots=True)
class Version:
    """The course of one version: allocated, then announced, then settled; or abandoned before it was announced."""

    version: int
    step: int
    digest: str
    reason: str
    publisher: str
    """Incarnation of the trainer that publishes it."""
    allocated_at: float
    phase: Literal["allocated", "announced", "settled", "abandoned"] = "allocated"
    group: Group | None = None
    """Formed when it is announced. None: there was no member, so it is told and can be pulled, but not sent."""
    announced_at: float = 0.0
    deadline: float = 0.0
    """When whoever has not answered is left behind."""
    result: Literal["", "ok", "failed"] = ""
    """The publisher's word on its broadcast."""
    error: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    """Replica -> `broadcast` or `snapshot` once it verified its copy, `failed` if it could not use the broadcast."""
    dropped: list[str] = field(default_factory=list)
    """Members that were left behind over this version."""

    def awaited(self) -> list[Member]:
        """Members of its group that have neither answered nor been left behind."""
        members = self.group.members if self.group else []
        return [m for m in members if m.replica not in self.answers and m.replica not in self.dropped]

    def clean(self) -> bool:
        """Everyone in the group got it by broadcast."""
        members = self.group.members if self.group else []
        return self.result == "ok" and all(self.answers.get(member.replica) == "broadcast" for member in members)


@schema("dcs_state", 2)
@dataclass(slots=True)
class State:
    """All that a restarted DCS needs."""

    url: str = ""
    """Where the DCS listens."""
    next_version: int = 1
    epoch: int = 0
    publisher: str = ""
    retired: list[str] = field(default_factory=list)
    """Publishers that were replaced."""
    group: Group | None = None
    """The newest group, while it can be used again."""
    members: list[Member] = field(default_factory=list)
    """Who wants to be in the next group."""
    versions: list[Version] = field(default_factory=list)
    held: dict[str, int] = field(default_factory=dict)
    """Replica -> the version that it last verified."""
    pins: list[int] = field(default_factory=list)
    """Versions whose snapshots are kept until they are unpinned."""
    received_seq: int = 0
    """Last message of the weights stream that is folded into this state."""

    def dump(self) -> bytes:
        """One message for the broker, which takes no more than a megabyte as one: each group is in it once, however many
        versions went to it, and all of it is compressed."""
        groups: dict[int, Group] = {}
        for group in (self.group, *(known.group for known in self.versions)):
            if group is not None:
                groups[group.epoch] = group
        epochs = [known.group.epoch if known.group else 0 for known in self.versions]
        bare = replace(self, group=None, versions=[replace(known, group=None) for known in self.versions])
        stored = Stored(bare, list(groups.values()), self.group.epoch if self.group else 0, epochs)
        return zlib.compress(encode(stored), COMPRESSION)

    @classmethod
    def load(cls, data: bytes) -> State:
        """Raises WireError."""
        try:
            stored = decode(zlib.decompress(data), Stored)
        except (zlib.error, WireError) as error:
            raise WireError(
                f"key {STATE_KEY!r} of the run's config bucket is no state of this DCS ({error}). If another release of "
                "Slipstream wrote it, delete the key: version numbers go on from what was announced, and replicas join again"
            ) from error
        groups: dict[int, Group | None] = {0: None} | {group.epoch: group for group in stored.groups}
        state = stored.state
        state.group = groups[stored.epoch]
        for known, epoch in zip(state.versions, stored.epochs, strict=True):
            known.group = groups[epoch]
        return state


@schema("dcs_stored", 2)
@dataclass(slots=True)
class Stored:
    """A State as it lies in KV. Epoch 0 is no group."""

    state: State
    """Without groups."""
    groups: list[Group]
    epoch: int
    """Of the newest group."""
    epochs: list[int]
    """Of each version's group."""
