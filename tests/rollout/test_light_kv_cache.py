"""What fits is decided before it starts; a new layout keeps what running rows hold."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout.engines.light.kv_cache import ROW_UNIT, KVCache, plan, row_length
from services.rollout.engines.light.model import ModelConfig
from services.rollout.engines.light.prefill import chunks

CONFIG = ModelConfig("Qwen3ForCausalLM", 2, 8, 8, 2, 1, 4, 10, 1e-6, 1e4, 512, True, frozenset(), torch.float32)


@settings(deadline=None)
@given(
    running=st.integers(0, 6),
    length=st.sampled_from([ROW_UNIT, 2 * ROW_UNIT, 4 * ROW_UNIT]),
    needs=st.lists(st.integers(1, 5 * ROW_UNIT), max_size=8),
    units=st.integers(6, 40),
    max_rows=st.integers(1, 8),
)
def test_a_plan_never_exceeds_rows_or_capacity_and_never_starves(running, length, needs, units, max_rows) -> None:
    capacity = max(units * ROW_UNIT, running * length)
    count, new_length = plan(running, length, iter(needs), capacity, max(max_rows, running))
    assert running + count <= max(max_rows, running)
    assert (running + count) * new_length <= capacity
    assert all(need <= new_length for need in needs[:count])
    if running:
        assert new_length >= length  # running rows keep their room
    if not running and needs and row_length(needs[0]) <= capacity:
        assert count >= 1  # an idle engine always starts the next request


def test_a_new_layout_keeps_what_the_used_rows_hold() -> None:
    cache = KVCache(CONFIG, 8 * ROW_UNIT, torch.device("cpu"), torch.float32)
    for layer in cache.layers:
        layer.copy_(torch.rand(layer.shape))
    before = [layer[:3, :, :40].clone() for layer in cache.layers]
    for length in (2 * ROW_UNIT, ROW_UNIT, 2 * ROW_UNIT):
        cache.lay_out(length, used_rows=3, used_length=40)
        assert cache.length == length
        for kept, layer in zip(before, cache.layers, strict=True):
            assert torch.equal(layer[:3, :, :40], kept)


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), max_size=30), st.integers(1, 400))
def test_prefill_chunks_cover_everything_in_order_within_the_budget(lengths: list[int], budget: int) -> None:
    ranges = list(chunks(lengths, budget))
    assert [i for first, stop in ranges for i in range(first, stop)] == list(range(len(lengths)))
    for first, stop in ranges:
        assert stop - first == 1 or (stop - first) * max(lengths[first:stop]) <= budget
