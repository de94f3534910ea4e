"""Packing: every sample once, the budget kept, columns aligned, the same whatever the timing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.batches import Packer, SampleTooLong, TrainSample, assemble, pack

BUDGET = 40


@st.composite
def sample_lists(draw: st.DrawFn) -> list[TrainSample]:
    def one(index: int) -> TrainSample:
        prompt, completion = draw(st.integers(1, 12)), draw(st.integers(0, 20))
        rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
        logprobs = rng.normal(-2, 1, completion).astype(np.float32)
        logprobs[rng.random(completion) < 0.1] = np.nan
        return TrainSample(
            group_id=f"0-{index}",
            ids=rng.integers(0, 100, prompt + completion).astype(np.int32),
            prompt_len=prompt,
            mask=(rng.random(completion) < 0.7).astype(np.uint8),
            logprobs=logprobs,
            advantage=rng.normal(size=completion).astype(np.float32) if draw(st.booleans()) else float(rng.normal()),
            extras={"reference": logprobs - 1},
        )

    return [one(index) for index in range(draw(st.integers(0, 12)))]


@settings(max_examples=80, deadline=None)
@given(sample_lists())
def test_every_sample_once_within_the_budget_and_aligned(chosen: list[TrainSample]) -> None:
    batches = pack(chosen, BUDGET)
    assert sorted(name for batch in batches for name in batch.group_ids) == sorted(sample.group_id for sample in chosen)
    by_name = {sample.group_id: sample for sample in chosen}
    for batch in batches:
        assert 0 < batch.tokens <= BUDGET
        assert list(batch.lengths_S) == sorted(batch.lengths_S)
        starts_S = np.cumsum(batch.lengths_S) - batch.lengths_S
        for s, name in enumerate(batch.group_ids):
            sample, here = by_name[name], batch.sequence_N == s
            span = slice(starts_S[s], starts_S[s] + batch.lengths_S[s])
            tokens = np.flatnonzero(sample.mask)
            np.testing.assert_array_equal(batch.ids_T[span], sample.ids)
            np.testing.assert_array_equal(batch.positions_T[span], np.arange(len(sample.ids)))
            np.testing.assert_array_equal(batch.rows_N[here] + 1 - starts_S[s], sample.prompt_len + tokens)
            np.testing.assert_array_equal(batch.targets_N[here], batch.ids_T[batch.rows_N[here] + 1])
            finite = np.isfinite(sample.logprobs[tokens])
            np.testing.assert_array_equal(batch.mask_N[here], finite)
            np.testing.assert_array_equal(
                batch.rollout_logprobs_N[here], np.where(finite, sample.logprobs[tokens], 0).astype(np.float32)
            )
            advantage = np.broadcast_to(np.float32(sample.advantage), sample.mask.shape)[tokens]
            np.testing.assert_array_equal(batch.advantages_N[here], advantage)
            np.testing.assert_array_equal(batch.extras["reference"][here], (sample.logprobs - 1)[tokens])
        assert batch.nonfinite == (~batch.mask_N).sum()


@settings(max_examples=40, deadline=None)
@given(sample_lists())
def test_streaming_gives_the_same_batches_and_keeps_nothing(chosen: list[TrainSample]) -> None:
    packer = Packer(BUDGET)
    streamed = [batch for sample in chosen for batch in packer.add(sample)]
    assert packer.pending == (len(chosen) - sum(len(batch.group_ids) for batch in streamed))
    streamed += packer.flush()
    assert packer.pending == 0
    assert packer.flush() == []
    whole = pack(chosen, BUDGET)
    assert [batch.group_ids for batch in streamed] == [batch.group_ids for batch in whole]
    assert all(np.array_equal(a.ids_T, b.ids_T) for a, b in zip(streamed, whole, strict=True))


def sample(length: int, prompt: int = 1) -> TrainSample:
    completion = length - prompt
    return TrainSample(
        "7-3", np.arange(length), prompt, np.ones(completion), np.zeros(completion, dtype=np.float32), 1.0
    )


def test_a_sequence_longer_than_the_budget_names_its_group_and_spoils_nothing() -> None:
    packer = Packer(BUDGET)
    packer.add(sample(10))
    with pytest.raises(
        SampleTooLong, match=r"group 7-3: a sequence of 41 tokens exceeds trainer\.micro_batch_tokens \(40\)"
    ):
        packer.add(sample(BUDGET + 1))
    assert len(packer.add(sample(BUDGET))) == 1
    assert packer.pending == 1


def test_equal_lengths_become_neighbours_in_order_of_arrival() -> None:
    lengths = [5, 3, 5, 3, 4]
    named = [
        TrainSample(str(i), np.arange(n), 1, np.ones(n - 1), np.zeros(n - 1, dtype=np.float32), 0.0)
        for i, n in enumerate(lengths)
    ]
    assert assemble(named).group_ids == ("1", "3", "4", "0", "2")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"prompt_len": 0}, "prompt_len 0 does not fit 5 tokens"),
        ({"prompt_len": 6}, "prompt_len 6 does not fit"),
        ({"mask": np.ones(4)}, "mask has 4 entries for 3"),
        ({"logprobs": np.zeros(2)}, "logprobs has 2 entries"),
        ({"advantage": np.zeros(1)}, "advantage has 1 entries"),
        ({"extras": {"reference": np.zeros(9)}}, "reference has 9 entries"),
    ],
)
def test_columns_that_do_not_fit_are_refused(fields: dict[str, object], text: str) -> None:
    good = {
        "group_id": "0-0",
        "ids": np.arange(5),
        "prompt_len": 2,
        "mask": np.ones(3),
        "logprobs": np.zeros(3),
        "advantage": 1.0,
    }
    with pytest.raises(ValueError, match=text):
        TrainSample(**{**good, **fields})  # type: ignore[arg-type]
