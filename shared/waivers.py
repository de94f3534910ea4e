"""After a rollback: which groups need no longer wait for the weights that they were promised.

A group's `min_step` was right in the history of the weights in which it was issued. When the trainer goes back to the weights
of step R, that history is gone: groups issued before may ask for steps that lie far ahead, while the updates in between wait
for just these groups. The controller therefore writes under `KEY` in the run's config bucket: groups with an issue number below
`issue` need not wait for more than `step`. The bound on staleness stands all the same, for the trainer checks every group's age
when it takes it (`stale`, and then the prompt is issued again). `tests/controller/test_credits.py` shows the deadlock without
waivers, and none with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.records import Group
from shared.wire import decode, encode, schema

KEY = "rollbacks"


@schema("waivers", 1)
@dataclass(slots=True)
class Waivers:
    """One entry a rollback, in the order in which they happened."""

    issues: list[int] = field(default_factory=list)
    """The first issue number of the new history."""
    steps: list[int] = field(default_factory=list)
    """The step that the trainer went back to."""

    def __post_init__(self) -> None:
        if len(self.issues) != len(self.steps):
            raise ValueError(f"{len(self.issues)} issues for {len(self.steps)} steps")

    def add(self, issue: int, step: int) -> None:
        self.issues.append(issue)
        self.steps.append(step)

    def min_step(self, group: Group) -> int:
        """The step whose weights the group really has to wait for."""
        waived = [step for issue, step in zip(self.issues, self.steps, strict=True) if group.issue < issue]
        return min([group.min_step, *waived])

    def dump(self) -> bytes:
        return encode(self)

    @classmethod
    def load(cls, entry: tuple[bytes, int] | None) -> Waivers:
        """What `KV.get(KEY)` gave; no entry means that nothing was ever rolled back."""
        return cls() if entry is None else decode(entry[0], cls)
