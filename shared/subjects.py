"""Every subject, stream and bucket name of a run. The only file in which one is spelled.

A run's names all start with the run's own name, so that two runs on one broker never meet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

STREAMS = (
    "prompts",
    "partials",
    "rewards",
    "trajectories",
    "teacher",
    "reference",
    "advantages",
    "receipts",
    "weights",
    "metrics",
    "events",
    "dead",
    "blobs",
    "archive",
)


def check_run_name(run: str) -> str:
    """Return `run`, or raise ValueError: a name becomes a subject token and a stream name, so dots and spaces are out."""
    if not RUN_NAME.fullmatch(run):
        raise ValueError(
            f"run name {run!r}: use letters, digits, '_' and '-', at most 64, starting with a letter or digit"
        )
    return run


@dataclass(frozen=True, slots=True)
class Subjects:
    """The names of one run. `Subjects("demo").prompts` is `"demo.prompts"`."""

    run: str

    def __post_init__(self) -> None:
        check_run_name(self.run)

    @property
    def prompts(self) -> str:
        return f"{self.run}.prompts"

    @property
    def reward_requests(self) -> str:
        return f"{self.run}.rewards.requests"

    def partial(self, group_id: str, index: int | str) -> str:
        """A finished sample of a group that is not finished; `*` for all of them."""
        return f"{self.run}.partials.{group_id}.{index}"

    def trajectory(self, group_id: str) -> str:
        """One subject a group, so that the broker itself refuses a second one (`publish(..., once=True)`)."""
        return f"{self.run}.trajectories.{group_id}"

    def stage(self, role: str) -> str:
        """Groups that wait for the model of `role` (shared/columns.py)."""
        return f"{self.run}.{role}"

    @property
    def advantages(self) -> str:
        return f"{self.run}.advantages"

    @property
    def receipts(self) -> str:
        """What the controller and the trainer decide; only they may write here."""
        return f"{self.run}.receipts"

    @property
    def reported(self) -> str:
        """What whoever works on a group may put on record of it: REPORTS. In the same stream."""
        return f"{self.run}.receipts.reported"

    @property
    def announced(self) -> str:
        return f"{self.run}.weights.announced"

    @property
    def received(self) -> str:
        return f"{self.run}.weights.received"

    def metrics(self, service: str, replica: str) -> str:
        return f"{self.run}.metrics.{service}.{replica}"

    def events(self, service: str) -> str:
        return f"{self.run}.events.{service}"

    def dead(self, stage: str) -> str:
        return f"{self.run}.dead.{stage}"

    def blob(self, sha256: str, part: int | str) -> str:
        """A part of a payload that a work queue's message refers to; `*` for all parts."""
        return f"{self.run}.blobs.{sha256}.{part}"

    def archived(self, sha256: str, part: int | str) -> str:
        """A part of a payload that a log's message refers to; `*` for all parts."""
        return f"{self.run}.archive.{sha256}.{part}"

    def taken_by(self, stream: str) -> list[str]:
        """The subjects that `stream`, one of STREAMS, stores."""
        return [self.receipts, self.reported] if stream == "receipts" else [self.wildcard(stream)]

    def wildcard(self, stream: str) -> str:
        """The subject filter that covers everything in `stream`, one of STREAMS; of the receipts, those that are decisions."""
        if stream not in STREAMS:
            raise ValueError(f"unknown stream {stream!r}: one of {', '.join(STREAMS)}")
        one_subject = {
            "prompts": self.prompts,
            "rewards": self.reward_requests,
            "teacher": self.stage("teacher"),
            "reference": self.stage("reference"),
            "advantages": self.advantages,
            "receipts": self.receipts,
        }
        return one_subject.get(stream, f"{self.run}.{stream}.>")

    def stream(self, name: str) -> str:
        """JetStream's name of the stream `name`, one of STREAMS."""
        if name not in STREAMS:
            raise ValueError(f"unknown stream {name!r}: one of {', '.join(STREAMS)}")
        return f"{self.run}_{name}"

    @property
    def config_bucket(self) -> str:
        return f"{self.run}_config"

    @property
    def services_bucket(self) -> str:
        return f"{self.run}_services"
