"""The versions of a run's weights as people want to see them: what came when, who holds it, how it got there, how long it took.

Pure: made from what the weights stream says and the DCS's stored state, so it needs no DCS that runs.
tests/controller/test_weights_view.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.dcs.state import State
from shared.records import Announcement, Received

PUBLISHER_PHASES = ("copy_s", "checksum_s", "snapshot_s", "join_s", "broadcast_s")


@dataclass(slots=True)
class Delivery:
    """What one replica did with a version."""

    how: str
    """broadcast | snapshot | delta | folder | failed"""
    seconds: dict[str, float]
    error: str = ""
    tries: int = 1


@dataclass(slots=True)
class VersionView:
    version: int
    step: int
    digest: str
    reason: str
    at: float
    result: str
    """ok | failed: why | '' while it is on its way, or when it is too long ago."""
    pinned: bool
    publisher: dict[str, float]
    """Seconds of the publisher's phases."""
    replicas: dict[str, Delivery] = field(default_factory=dict)


@dataclass(slots=True)
class WeightsView:
    versions: list[VersionView]
    held: dict[str, int]
    """Replica -> the version that it last verified."""
    members: list[str]
    """Who is in the next broadcast."""
    epoch: int


def view(announced: Iterable[Announcement], received: Iterable[Received], state: State) -> WeightsView:
    known = {version.version: version for version in state.versions}
    versions: dict[int, VersionView] = {}
    for told in announced:
        course = known.get(told.version)
        result = "" if course is None else f"failed: {course.error}" if course.result == "failed" else course.result
        versions.setdefault(
            told.version,
            VersionView(
                told.version,
                told.step,
                told.digest,
                told.reason,
                told.at,
                result,
                told.version in state.pins,
                {name: course.seconds[name] for name in PUBLISHER_PHASES if name in course.seconds} if course else {},
            ),
        )
    for answer in received:
        if answer.version not in versions:
            continue
        replicas = versions[answer.version].replicas
        before = replicas.get(answer.replica)
        how = answer.how if answer.ok else "failed"
        replicas[answer.replica] = Delivery(how, answer.seconds, answer.error, 1 + (before.tries if before else 0))
    members = sorted(member.replica for member in state.members)
    return WeightsView([versions[number] for number in sorted(versions)], dict(state.held), members, state.epoch)
