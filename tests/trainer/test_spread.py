"""Spreader hold every sample once, within the budget, balanced over replicas, and do not depend on anything else."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.batches import SampleTooLong, TrainSample, pack
from services.trainer.layout import Layout
from services.trainer.spread import Spread, Spreader, cost, empty_like, share_out, spread

BUDGET = 64


def sample(length: int, number: int = 0) -> TrainSample:
    size = length - 1
    return TrainSample(
        group_id=f"0-{number}",
        ids=np.full(length, number, dtype=np.int32),
        prompt_len=1,
        mask=np.ones(size, dtype=np.uint8),
        logprobs=np.zeros(size, dtype=np.float32),
        advantage=1.0,
        extras={"age": np.ones(size, dtype=np.float32)},
    )


layouts = st.builds(
    lambda data, pipeline, virtual, expert: Layout(
        ranks=data * pipeline,
        pipeline=pipeline,
        virtual=2 if virtual and pipeline > 1 else None,
        expert=data if expert else 1,
    ),
    data=st.integers(1, 4),
    pipeline=st.integers(1, 3),
    virtual=st.booleans(),
    expert=st.booleans(),
)


@settings(deadline=None, max_examples=60)
@given(layout=layouts, units=st.lists(st.lists(st.integers(2, 20), min_size=1, max_size=3), max_size=40))
def test_every_sample_once_and_together(layout: Layout, units: list[list[int]]) -> None:
    numbered = [tuple(sample(length, number) for length in unit) for number, unit in enumerate(units)]
    found = spread(numbered, BUDGET, layout)
    seen: list[str] = []
    for one in found:
        assert len(one.replicas) == layout.data
        counts = {len(batches) for batches in one.replicas}
        assert min(counts) >= 1
        if layout.in_step:
            assert len(counts) == 1
        if layout.virtual:
            assert all(count % layout.pipeline == 0 for count in counts)
        for batch in one.batches:
            assert batch.tokens <= BUDGET
            seen += batch.group_ids
        for group in {name for batch in one.batches for name in batch.group_ids}:
            assert sum(group in batch.group_ids for batch in one.batches) == 1
    assert sorted(seen) == sorted(chain.from_iterable([f"0-{n}"] * len(unit) for n, unit in enumerate(units)))


@settings(deadline=None, max_examples=60)
@given(replicas=st.integers(1, 8), lengths=st.lists(st.integers(2, 20000), max_size=60))
def test_no_replica_has_more_than_its_share_and_one_sample(replicas: int, lengths: list[int]) -> None:
    units = [(sample(2, number),) for number in range(len(lengths))]
    for unit, length in zip(units, lengths, strict=True):
        object.__setattr__(unit[0], "ids", np.broadcast_to(np.int32(0), length))
    loads = [sum(cost(len(one.ids)) for (one,) in share) for share in share_out(units, replicas)]
    largest = max((cost(length) for length in lengths), default=0)
    assert max(loads) <= sum(loads) / replicas + largest


def test_long_samples_weigh_more_than_their_tokens() -> None:
    assert cost(12 * 1024) == 2 * 12 * 1024
    shares = share_out([(sample(60, 0),), *[(sample(20, n),) for n in range(1, 4)]], 2)
    assert [[len(one.ids) for (one,) in share] for share in shares] == [[60], [20, 20, 20]]


def test_one_replica_gets_what_the_packer_gives() -> None:
    chosen = [sample(length, number) for number, length in enumerate([9, 30, 30, 5, 50, 2])]
    found = spread([(one,) for one in chosen], BUDGET, Layout())
    for one, batch in zip(found, pack(chosen, BUDGET), strict=True):
        np.testing.assert_array_equal(one.batches[0].ids_T, batch.ids_T)


def test_rounds_come_as_soon_as_all_replicas_can_be_busy() -> None:
    builder = Spreader(BUDGET, Layout(ranks=2))
    counts = [len(builder.add(sample(30, number))) for number in range(9)]
    assert counts == [0, 0, 0, 0, 1, 0, 0, 0, 1]
    assert len(builder.flush()) == 1
    assert builder.flush() == []


def test_a_sample_over_the_budget_is_refused_in_every_layout() -> None:
    for layout in (Layout(), Layout(ranks=2)):
        with pytest.raises(SampleTooLong, match=r"group 0-0: a sequence of 70 tokens"):
            Spreader(BUDGET, layout).add(sample(70))


def test_an_empty_micro_batch_is_one_token_of_nothing() -> None:
    (batch,) = pack([sample(5)], BUDGET)
    empty = empty_like(batch)
    assert (empty.tokens, empty.group_ids, len(empty.targets_N), len(empty.extras["age"])) == (1, (), 0, 0)
    assert Spread(((batch,), (empty,))).batches == [batch]
