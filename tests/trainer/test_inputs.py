"""Filling up and cutting keeps every token once, in its place, and balances the pieces of context parallelism."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.layout import Layout
from services.trainer.megatron.inputs import place


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    context=st.integers(1, 4),
    tensor=st.sampled_from([1, 2, 4]),
    at_least=st.sampled_from([0, 96, 480]),
)
def test_every_token_is_on_one_rank(lengths: list[int], context: int, tensor: int, at_least: int) -> None:
    layout = Layout(ranks=context * tensor, context=context, tensor=tensor, sequence=tensor > 1)
    at_least = -(-at_least // layout.align_total) * layout.align_total
    total, seen = sum(lengths), np.zeros(sum(lengths), dtype=int)
    sizes = set()
    for rank in range(context):
        found = place(np.array(lengths), layout, rank, at_least)
        sizes.add(len(found.source_M))
        assert all(length % layout.align_sequence == 0 for length in found.lengths_S)
        assert sum(found.lengths_S) % layout.align_total == 0
        assert sum(found.lengths_S) >= at_least
        here = np.flatnonzero(found.place_T >= 0)
        seen[here] += 1
        np.testing.assert_array_equal(found.source_M[found.place_T[here]], here)
        assert found.source_M.max() < total
    assert (seen == 1).all()
    assert sizes == {sum(found.lengths_S) // context}


def test_without_context_parallelism_nothing_moves() -> None:
    found = place(np.array([3, 5]), Layout(), 0)
    assert found.lengths_S == [3, 5]
    np.testing.assert_array_equal(found.source_M, np.arange(8))


@pytest.mark.parametrize(("rank", "first", "second"), [(0, [0, 1, 6, 7], [8, 11]), (1, [2, 3, 4, 5], [9, 10])])
def test_a_rank_has_an_early_and_a_late_piece_of_each_sequence(rank: int, first: list[int], second: list[int]) -> None:
    found = place(np.array([8, 4]), Layout(ranks=2, context=2), rank)
    assert found.source_M.tolist() == first + second
