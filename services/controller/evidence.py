"""What a run's streams say, read once and kept small: the material of `slipstream audit` and of report.json.

`gather` is the only I/O here. Token columns are not kept: of each trajectory stay its spans and a hash of its content.
`tests/controller/test_audit.py` builds this evidence from records and plants faults in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shared import config as run_config
from shared.config import RunConfig
from shared.ledger import Ledger
from shared.records import Announcement, DeadLetter, Event, Group, Heartbeat, Metric, Receipt, Received
from shared.wire import UNFIT, decode, decode_any

if TYPE_CHECKING:
    from shared.kv import KV
    from shared.transfer_queue import TransferQueue


@dataclass(slots=True, frozen=True)
class Drawn:
    """One entry of the trajectories log without its tokens."""

    group_id: str
    kind: str
    replica: str
    content: str
    """sha256 over what would be trained on: ids, log-probabilities, masks, lengths and spans."""
    tokens: int
    samples: int
    span_sample: tuple[int, ...]
    span_version: tuple[int, ...]
    span_step: tuple[int, ...]
    replicas: tuple[str, ...] = ()
    """[G] if several replicas drew it."""

    @classmethod
    def of(cls, group: Group) -> Drawn | None:
        """None for a group that carries no samples."""
        if (samples := group.samples) is None:
            return None
        spans = (samples.span_sample, samples.span_start, samples.span_end, samples.span_version, samples.span_step)
        content = hashlib.sha256()
        for column in (samples.lengths, samples.ids, samples.logprobs, samples.mask, *spans):
            content.update(np.ascontiguousarray(column).tobytes())
        return cls(
            group_id=group.id,
            kind=group.kind,
            replica=group.replica,
            content=content.hexdigest(),
            tokens=len(samples.ids),
            samples=len(samples.lengths),
            span_sample=tuple(samples.span_sample.tolist()),
            span_version=tuple(samples.span_version.tolist()),
            span_step=tuple(samples.span_step.tolist()),
            replicas=tuple(samples.replicas),
        )

    def drawn_by(self) -> set[tuple[str, int]]:
        """(replica, version) of all that drew a token of it."""
        who = self.replicas or (self.replica,) * self.samples
        return {(who[sample], version) for sample, version in zip(self.span_sample, self.span_version, strict=True)}

    def oldest_steps(self, step_of: dict[int, int], rollbacks: Sequence[Rollback] = ()) -> list[int]:
        """[G] for each sample the oldest step that any token was drawn under, by the announcements (-1: no token).

        Weights of a history that a rollback undid count from the last step that both histories share. A version that was never
        announced counts as what its span claims; the audit reports it apart.
        """
        oldest: dict[int, int] = {}
        for sample, version, claimed in zip(self.span_sample, self.span_version, self.span_step, strict=True):
            step = step_of.get(version, claimed)
            step = min([step, *(rollback.step for rollback in rollbacks if version < rollback.version)])
            oldest[sample] = min(step, oldest.get(sample, step))
        return [oldest.get(sample, -1) for sample in range(self.samples)]


@dataclass(slots=True, frozen=True)
class Rollback:
    """The trainer went back to `step`; versions below `version` that hold later steps are of a lost history."""

    version: int
    step: int


@dataclass(slots=True, frozen=True)
class Training:
    """A group took part in an update: the receipt, what was trained on, and how old that was by the announcements."""

    receipt: Receipt
    drawn: Drawn
    oldest: list[int]
    """[G]"""


@dataclass(slots=True)
class Evidence:
    """Everything that was read, each list in the order of its log."""

    receipts: list[Receipt] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    announced: list[Announcement] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    dead: list[DeadLetter] = field(default_factory=list)
    metrics: list[Metric] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    alive: list[Heartbeat] = field(default_factory=list)
    config: RunConfig | None = None
    config_bytes: bytes = b""
    state: str = ""
    """running | finished | failed:<why>"""
    unfit: int = 0
    """Messages whose writer had no right to them."""
    cut: dict[str, int] = field(default_factory=dict)
    """Streams whose limit has discarded their oldest messages: how many. What they held cannot be checked any more."""

    def ledger(self) -> Ledger:
        ledger = Ledger()
        for receipt in self.receipts:
            ledger.apply(receipt)
        return ledger

    def step_of(self) -> dict[int, int]:
        """The training step of each announced version."""
        return {announcement.version: announcement.step for announcement in self.announced}

    def drawn_by_id(self) -> dict[str, list[Drawn]]:
        """The log's entries of each group: more than one if a message was written twice."""
        found: dict[str, list[Drawn]] = {}
        for drawn in self.drawn:
            found.setdefault(drawn.group_id, []).append(drawn)
        return found

    def trainings(self) -> list[Training]:
        """Each `trained` receipt with each trajectory of its group, in the log's order; those that a rollback undid too."""
        drawn_by_id, step_of = self.drawn_by_id(), self.step_of()
        rollbacks: list[Rollback] = []
        found = []
        ledger = Ledger()
        for receipt in self.receipts:
            fenced = ledger.is_fenced(receipt)
            ledger.apply(receipt)
            if fenced:
                continue
            if receipt.kind == "rollback":
                if "version" in receipt.detail and not receipt.detail.get("repeats"):
                    rollbacks.append(Rollback(receipt.detail["version"], receipt.step))
            elif receipt.kind == "trained":
                for drawn in drawn_by_id.get(receipt.group_id, []):
                    found.append(Training(receipt, drawn, drawn.oldest_steps(step_of, rollbacks)))
        return found

    def final_trainings(self, ledger: Ledger) -> list[Training]:
        """Those that the final weights come from: the last of each group that is trained."""
        last = {training.receipt.group_id: training for training in self.trainings()}
        return [training for group_id, training in last.items() if ledger.fate(group_id) == "trained"]


async def gather(queue: TransferQueue, kv: KV, *, with_metrics: bool = False) -> Evidence:
    """Read the run's logs up to their present ends. `kv` is the run's config bucket."""
    evidence = Evidence()
    if (entry := await kv.get("config")) is not None:
        evidence.config_bytes, evidence.config = entry[0], run_config.loads(entry[0])
    if (entry := await kv.get("state")) is not None:
        evidence.state = entry[0].decode()
    async for data in _log(queue, evidence, "receipts"):
        evidence.receipts.append(decode(data, Receipt))
    async for data in _log(queue, evidence, "trajectories"):
        if (drawn := Drawn.of(decode(data, Group))) is not None:
            evidence.drawn.append(drawn)
    async for data in _log(queue, evidence, "weights"):
        record = decode_any(data)
        (evidence.announced if isinstance(record, Announcement) else evidence.received).append(record)
    async for data in _log(queue, evidence, "dead"):
        evidence.dead.append(decode(data, DeadLetter))
    if with_metrics:
        async for data in _log(queue, evidence, "metrics"):
            evidence.metrics.append(decode(data, Metric))
        async for data in _log(queue, evidence, "events"):
            evidence.events.append(decode(data, Event))
    return evidence


async def _log(queue: TransferQueue, evidence: Evidence, stream: str) -> AsyncIterator[bytes]:
    """The stream's messages so far; notes how many of its oldest are gone."""
    first = True
    async for data, seq in queue.read(stream):
        if first and seq > 1:
            evidence.cut[stream] = seq - 1
        first = False
        if data is UNFIT:
            evidence.unfit += 1
        else:
            yield data
