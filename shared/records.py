"""The records that travel between services. One class a message kind; `shared.wire` gives them their bytes.

Shapes: P prompt tokens, G samples in the group, N completion tokens of all samples together, K spans.
Token columns of the G samples are concatenated; `lengths` says where one ends. Token in, token out: `ids` and `logprobs`
are what the engine sampled, never re-tokenised. A record checks its own lengths and refuses what does not fit
(ValueError, which the wire layer turns into WireError), so no reader ever indexes a column out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np

from shared.wire import schema

Ints = Annotated[np.ndarray, "<i4"]
Floats = Annotated[np.ndarray, "<f4"]
Bytes = Annotated[np.ndarray, "|u1"]

Message = dict[str, Any]
"""One chat message: {"role": ..., "content": ...}."""


def ints(values: Any) -> np.ndarray:
    return np.asarray(values, dtype="<i4")


def floats(values: Any) -> np.ndarray:
    return np.asarray(values, dtype="<f4")


@schema("sampling", 1)
@dataclass(slots=True)
class Sampling:
    """How a group's completions are drawn."""

    n: int
    """Samples in the group, G."""
    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    stop: list[str] = field(default_factory=list)
    seed: int | None = None
    """With a seed the tokens depend on (seed, sample, position, weights) only."""


@schema("samples", 1)
@dataclass(slots=True)
class Samples:
    """The G completions of one prompt, as the engine produced them.

    A span says under which weights a run of tokens was drawn: tokens [span_start, span_end) of sample `span_sample` under
    `span_version`, which holds the weights after `span_step` updates. The spans of a sample cover it without gaps.
    """

    lengths: Ints
    """[G] completion tokens of each sample."""
    ids: Ints
    """[N]"""
    logprobs: Floats
    """[N] the engine's log-probability of each token under the sampling distribution's softmax (temperature applied)."""
    mask: Bytes
    """[N] 1 where the policy chose the token, 0 where an environment wrote it."""
    finish: list[str]
    """[G] stop | length | abort."""
    texts: list[str]
    """[G] decoded for rewards and people; special tokens dropped, so use `finish` to see whether an answer ended."""
    span_sample: Ints
    span_start: Ints
    span_end: Ints
    span_version: Ints
    span_step: Ints
    replicas: list[str] = field(default_factory=list)
    """[G] who drew each sample; empty if all were drawn by the group's `replica`."""

    def __post_init__(self) -> None:
        total, groups = int(self.lengths.sum()), len(self.lengths)
        if self.lengths.ndim != 1 or (self.lengths < 0).any():
            raise ValueError("lengths: expected one count of at least 0 for each sample")
        for name in ("ids", "logprobs", "mask"):
            if getattr(self, name).shape != (total,):
                raise ValueError(f"{name}: shape {getattr(self, name).shape}, but lengths sum to {total}")
        for name in ("finish", "texts", *(["replicas"] if self.replicas else [])):
            if len(getattr(self, name)) != groups:
                raise ValueError(f"{name}: {len(getattr(self, name))} entries for {groups} samples")
        self._check_spans(groups)

    def _check_spans(self, groups: int) -> None:
        shape = self.span_sample.shape
        for name in ("span_start", "span_end", "span_version", "span_step"):
            if getattr(self, name).shape != shape or len(shape) != 1:
                raise ValueError(f"{name}: shape {getattr(self, name).shape}, but span_sample has {shape}")
        covered = np.zeros(groups, dtype=np.int64)
        for sample, start, end in zip(
            self.span_sample.tolist(), self.span_start.tolist(), self.span_end.tolist(), strict=True
        ):
            if not 0 <= sample < groups or start != covered[sample] or end <= start:
                raise ValueError(f"span [{start}, {end}) of sample {sample}: spans must follow each other from 0")
            covered[sample] = end
        if (covered != self.lengths).any():
            raise ValueError("spans do not cover every token of every sample")

    @property
    def offsets(self) -> np.ndarray:
        """[G + 1] where each sample starts in the token columns."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def owners(self) -> np.ndarray:
        """[N] the sample that each token belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def split(self) -> list[Samples]:
        """Each sample by itself: the inverse of `join`."""
        return [self._one(index) for index in range(len(self.lengths))]

    def _one(self, index: int) -> Samples:
        tokens = slice(*self.offsets[index : index + 2])
        mine = self.span_sample == index
        columns = {name: getattr(self, name)[tokens] for name in ("ids", "logprobs", "mask")}
        columns |= {name: getattr(self, name)[mine] for name in ("span_start", "span_end", "span_version", "span_step")}
        return Samples(
            lengths=self.lengths[index : index + 1],
            finish=[self.finish[index]],
            texts=[self.texts[index]],
            span_sample=ints(np.zeros(int(mine.sum()))),
            **columns,
        )

    @classmethod
    def join(cls, parts: Sequence[Samples]) -> Samples:
        """The samples of all parts, in their order. Who drew them is the caller's to say."""
        counts = np.cumsum([0, *(len(part.lengths) for part in parts)])
        names = ("lengths", "ids", "logprobs", "mask", "span_start", "span_end", "span_version", "span_step")
        columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        numbers = [part.span_sample + first for part, first in zip(parts, counts, strict=False)]
        return cls(
            finish=[reason for part in parts for reason in part.finish],
            texts=[text for part in parts for text in part.texts],
            span_sample=ints(np.concatenate(numbers)),
            **columns,
        )

    def drawn_under(self, step: int) -> bool:
        """Whether each sample was drawn in one go, under weights of `step`."""
        return bool((self.span_step == step).all()) and len(self.span_sample) == int((self.lengths > 0).sum())

    def oldest_steps(self) -> np.ndarray:
        """[G] for each sample, the step of the oldest weights that any of its tokens was drawn under (-1: no token)."""
        return self.oldest(self.span_step)

    def oldest(self, steps_K: np.ndarray) -> np.ndarray:
        """[G] for each sample the lowest of its spans' `steps_K` (-1: no token)."""
        oldest = np.full(len(self.lengths), np.iinfo(np.int32).max, dtype=np.int32)
        np.minimum.at(oldest, self.span_sample, steps_K)
        return np.where(self.lengths > 0, oldest, -1).astype("<i4")


@schema("finished_sample", 1)
@dataclass(slots=True)
class FinishedSample:
    """One sample of a group that is still being drawn: it outlives the replica that drew it."""

    group_id: str
    index: int
    """Which of the group's samples it is."""
    replica: str
    samples: Samples
    """Just this one."""


@schema("rewards", 1)
@dataclass(slots=True)
class Rewards:
    """Scores of the G samples."""

    total: Floats
    """[G] weighted sum of the parts; NaN marks a sample that could not be scored."""
    parts: dict[str, Floats]
    """[G] each, by reward function."""
    errors: list[str]
    """[G] why a sample could not be scored, or ''."""

    def __post_init__(self) -> None:
        if any(part.shape != self.total.shape for part in self.parts.values()) or len(self.errors) != len(self.total):
            raise ValueError(f"parts and errors must have {len(self.total)} entries each")


@schema("group", 1)
@dataclass(slots=True)
class Group:
    """One prompt with its G samples: the unit that is issued, sampled, scored, trained or dropped. Each stage fills a field."""

    id: str
    """`epoch-index` of the prompt in the data order; `.k` appended when it is issued again after a stale drop."""
    kind: Literal["train", "eval"]
    issue: int
    """Position in the order of issue, from 0; never reused. -1 for evaluation."""
    seat: int
    """Groups that go before it into training, as known at issue: trained + in flight. Sets `min_step`."""
    min_step: int
    """Weights older than this many updates may not draw a token of it."""
    prompt: str | list[Message]
    answer: Any
    meta: dict[str, Any]
    sampling: Sampling
    prompt_ids: Ints | None = None
    """[P]"""
    samples: Samples | None = None
    rewards: Rewards | None = None
    advantages: Floats | None = None
    """[G] one a sample, or [N] one a token."""
    columns: dict[str, Floats] = field(default_factory=dict)
    """[N] or [N, K] each: what stages with a model add a token, such as `reference_logprobs`. See docs/algorithms.md."""
    id_columns: dict[str, Ints] = field(default_factory=dict)
    """[N, K] each: token ids that belong to a column, such as `teacher_top_ids`."""
    replica: str = ""
    """The rollout replica that drew the samples."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds since the epoch at which a stage was done: issued, sampled, scored, advantages."""

    def __post_init__(self) -> None:
        if self.samples is None:
            return
        groups, tokens = len(self.samples.lengths), len(self.samples.ids)
        if self.rewards is not None and len(self.rewards.total) != groups:
            raise ValueError(f"rewards: {len(self.rewards.total)} scores for {groups} samples")
        if self.advantages is not None and self.advantages.shape not in ((groups,), (tokens,)):
            raise ValueError(f"advantages: shape {self.advantages.shape}, expected ({groups},) or ({tokens},)")
        for name, column in {**self.columns, **self.id_columns}.items():
            if column.shape[:1] != (tokens,) or column.ndim > 2:
                raise ValueError(f"columns: {name} has shape {column.shape}, expected ({tokens},) or ({tokens}, K)")


@schema("receipt", 1)
@dataclass(slots=True)
class Receipt:
    """An entry of the ledger. `shared.ledger` folds the receipts stream into the fate of every group.

    issued:    the controller gave the group a seat.
    trained:   it took part in update `step` (0-based).
    dropped:   it will never be trained; `reason` says why.
    rollback:  the trainer went back to the weights after `step` updates: whatever was trained in a later one is pending again.
    evaluated: an evaluation group was scored; it has no fate.
    """

    kind: Literal["issued", "trained", "dropped", "rollback", "evaluated"]
    group_id: str = ""
    issue: int = -1
    seat: int = -1
    min_step: int = 0
    step: int = -1
    reason: str = ""
    replica: str = ""
    sample_steps: Ints | None = None
    """[G] trained and evaluated: for each sample the step of the oldest weights that drew one of its tokens."""
    tokens: int = 0
    reward: float | None = None
    """Mean over the scored samples."""
    detail: dict[str, Any] = field(default_factory=dict)
    at: float = 0.0


@schema("announcement", 1)
@dataclass(slots=True)
class Announcement:
    """A new version of the weights, told by the DCS before it is sent."""

    version: int
    step: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    checksums: list[str]
    """sha256 of each tensor's bytes, in the order of `names`."""
    digest: str
    """One sha256 for all: see services/dcs/digest.py."""
    group: dict[str, Any] | None
    """How it is broadcast: epoch, backend, world_size, timeout_s; `senders` [{name, host, port}], each with a process group of
    its own; `sent_by`, the number of the sender of each bucket; `ranks` {incarnation: first rank}, with the first version of an
    epoch only. None: pull only."""
    buckets: list[list[int]]
    """Indices into `names`, bucket by bucket, in the order of sending."""
    snapshot: str
    """URL below which the DCS serves the files of this version, '' if there is none."""
    reason: str
    at: float
    resync: list[str] = field(default_factory=list)
    """Told again: these replicas are to fetch it anew, whatever they hold."""
    shared: dict[str, Any] | None = None
    """In memory that engines on the trainer's device take it from: `host`, and `segments`, one a bucket: a name, or the
    fields of a device handle (`placement: colocate`, services/dcs/handles.py). Its snapshot may be written later then."""


@schema("received", 1)
@dataclass(slots=True)
class Received:
    """What one replica did with a version. `ok` only after its digest was verified on the receiver's own copy."""

    replica: str
    version: int
    step: int
    digest: str
    how: Literal["broadcast", "shared", "snapshot", "delta", "folder"]
    """Through the group; from shared memory; or pulled: the whole snapshot over HTTP, what changed over HTTP, or from a disk that
    both see."""
    seconds: dict[str, float]
    ok: bool
    error: str
    at: float


@schema("metric", 1)
@dataclass(slots=True)
class Metric:
    """Numbers of one replica at one moment. Names and units: docs/metrics.md."""

    service: str
    replica: str
    step: int | None
    values: dict[str, float]
    at: float


@schema("event", 1)
@dataclass(slots=True)
class Event:
    """Something that a person may want to know later: a fault, a restart, a join, a drop."""

    service: str
    replica: str
    kind: str
    message: str
    detail: dict[str, Any]
    at: float


@schema("dead_letter", 1)
@dataclass(slots=True)
class DeadLetter:
    """A message that no consumer could digest, kept whole for people to look at."""

    stage: str
    group_id: str
    reason: str
    payload: bytes
    deliveries: int
    at: float


@schema("heartbeat", 1)
@dataclass(slots=True)
class Heartbeat:
    """Written by a worker's own loop, so that a heartbeat means that work advances."""

    service: str
    replica: str
    state: str
    progress: int
    """Grows whenever the loop got something done."""
    version: int
    step: int
    detail: dict[str, Any]
    host: str
    pid: int
    started: float
    at: float


@schema("blob_ref", 1)
@dataclass(slots=True)
class BlobRef:
    """Stands in for a message that exceeded the broker's limit: its bytes lie in the blob stream under their hash."""

    sha256: str
    size: int
    parts: int
