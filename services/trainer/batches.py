"""Packs samples into micro-batches under a token budget. Pure and torch-free.

T tokens of a micro-batch, S samples in it, N completion tokens that are trained on, L tokens of a sample, C of its completion.

The packer fills one micro-batch after another in the order of arrival and orders each by length, so that neighbours of equal
length share an attention call. The result depends on the order of samples and the budget only, never on timing: a run that
was killed packs the same way again. A sample is never split; one longer than the budget is a `SampleTooLong` that names its
group. Properties in tests/trainer/test_batches.py: every sample once, budget kept, columns aligned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np


class SampleTooLong(ValueError):
    """A sequence exceeds the token budget of a micro-batch."""


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One completion to be trained on."""

    group_id: str
    ids: np.ndarray
    """[L] prompt and completion."""
    prompt_len: int
    """At least 1: the first completion token needs something to be predicted from."""
    mask: np.ndarray
    """[C] nonzero where the policy chose the token."""
    logprobs: np.ndarray
    """[C] the engine's. NaN or infinite: the token is left out and counted."""
    advantage: float | np.ndarray
    """One number, or [C]."""
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    """[C, ...] further columns, such as reference log-probabilities."""

    def __post_init__(self) -> None:
        completion = len(self.ids) - self.prompt_len
        if self.prompt_len < 1 or completion < 0:
            raise ValueError(f"group {self.group_id}: prompt_len {self.prompt_len} does not fit {len(self.ids)} tokens")
        columns = {"mask": self.mask, "logprobs": self.logprobs, **self.extras}
        if isinstance(self.advantage, np.ndarray):
            columns["advantage"] = self.advantage
        for name, column in columns.items():
            if len(column) != completion:
                raise ValueError(
                    f"group {self.group_id}: {name} has {len(column)} entries for {completion} completion tokens"
                )


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A micro-batch: samples laid one after another, and the tokens of them that are trained on."""

    ids_T: np.ndarray
    positions_T: np.ndarray
    """Position of each token in its own sample."""
    lengths_S: np.ndarray
    rows_N: np.ndarray
    """Index in T of the token that predicts the trained one."""
    targets_N: np.ndarray
    """Ids of the trained tokens."""
    mask_N: np.ndarray
    """Bool: the engine's log-probability and the columns that belong to the token are finite."""
    rollout_logprobs_N: np.ndarray
    """Zero where the mask is unset."""
    advantages_N: np.ndarray
    sequence_N: np.ndarray
    """Index in S."""
    extras: Mapping[str, np.ndarray]
    group_ids: tuple[str, ...]
    """[S]"""

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.ids_T)

    @property
    def nonfinite(self) -> int:
        """Tokens left out because the engine, or a stage that added a column, gave no finite number."""
        return int(len(self.mask_N) - self.mask_N.sum())


class Packer:
    """Fills micro-batches as samples arrive."""

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self._open: list[TrainSample] = []
        self._tokens = 0

    @property
    def pending(self) -> int:
        """Samples not yet given out."""
        return len(self._open)

    def check(self, *samples: TrainSample) -> int:
        """Tokens of samples that must stay together, or SampleTooLong."""
        length = sum(len(sample.ids) for sample in samples)
        if length > self.token_budget:
            what = "a sequence" if len(samples) == 1 else f"{len(samples)} sequences that belong together"
            raise SampleTooLong(
                f"group {samples[0].group_id}: {what} of {length} tokens exceeds trainer.micro_batch_tokens "
                f"({self.token_budget}); raise it, or lower sampling.max_new_tokens or max_prompt_tokens"
            )
        return length

    def add(self, *samples: TrainSample) -> list[PackedBatch]:
        """Take a sample, or several that must stay together (a preference pair); the micro-batches that are full now."""
        length = self.check(*samples)
        full = self.flush() if self._tokens + length > self.token_budget else []
        self._open.extend(samples)
        self._tokens += length
        return full

    def flush(self) -> list[PackedBatch]:
        """What is left, as a micro-batch of its own."""
        samples, self._open, self._tokens = self._open, [], 0
        return [assemble(samples)] if samples else []


def pack(samples: Iterable[TrainSample], token_budget: int) -> list[PackedBatch]:
    """All micro-batches of these samples."""
    packer = Packer(token_budget)
    batches = [batch for sample in samples for batch in packer.add(sample)]
    return batches + packer.flush()


def assemble(samples: list[TrainSample]) -> PackedBatch:
    """One micro-batch of these samples, ordered by length."""
    samples = sorted(samples, key=lambda sample: len(sample.ids))  # stable: ties keep the order of arrival
    lengths_S = np.array([len(sample.ids) for sample in samples], dtype=np.int64)
    starts_S = np.cumsum(lengths_S) - lengths_S
    chosen = [np.flatnonzero(sample.mask) for sample in samples]
    counts_S = [len(tokens) for tokens in chosen]

    def column(values: Iterable[np.ndarray], dtype: np.dtype | type) -> np.ndarray:
        return np.concatenate([part[tokens] for part, tokens in zip(values, chosen, strict=True)]).astype(
            dtype, copy=False
        )

    rows_N = np.concatenate(
        [
            start + sample.prompt_len - 1 + tokens
            for start, sample, tokens in zip(starts_S, samples, chosen, strict=True)
        ]
    )
    logprobs_N = column((sample.logprobs for sample in samples), np.float32)
    extras = {
        name: column((sample.extras[name] for sample in samples), samples[0].extras[name].dtype)
        for name in samples[0].extras
    }
    mask_N = np.isfinite(logprobs_N)
    for values in extras.values():
        mask_N &= np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    return PackedBatch(
        ids_T=np.concatenate([sample.ids for sample in samples]).astype(np.int64, copy=False),
        positions_T=np.concatenate([np.arange(length) for length in lengths_S]),
        lengths_S=lengths_S,
        rows_N=rows_N.astype(np.int64, copy=False),
        targets_N=column((sample.ids[sample.prompt_len :] for sample in samples), np.int64),
        mask_N=mask_N,
        rollout_logprobs_N=np.where(mask_N, logprobs_N, np.float32(0.0)),
        advantages_N=column((_advantages(sample) for sample in samples), np.float32),
        sequence_N=np.repeat(np.arange(len(samples)), counts_S),
        extras=extras,
        group_ids=tuple(sample.group_id for sample in samples),
    )


def _advantages(sample: TrainSample) -> np.ndarray:
    if isinstance(sample.advantage, np.ndarray):
        return sample.advantage
    return np.full(len(sample.mask), sample.advantage, dtype=np.float32)
