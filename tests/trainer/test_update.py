"""When an update's micro-batches may begin, and that waiting for the whole update changes nothing but that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.trainer.update import UpdateBatches
from tests.trainer.test_advantages import group_of, run_of

TRAINER = {"micro_batch_tokens": 20}
SMALL = {"sampling": {"max_new_tokens": 10, "max_prompt_tokens": 10}, "trainer": TRAINER}


def fed(algorithm: dict[str, Any]) -> tuple[list[int], Any]:
    """(micro-batches after each group, all of them)."""
    run = run_of(algorithm, **SMALL)
    update = UpdateBatches(run, 3)
    found = [update.add(group_of([1.0, float(i % 2)], [4, 3 + i], run, number=i)) for i in range(4)]
    assert update.complete
    assert [group.issue for group in update.groups] == [0, 1, 2, 3]
    return [len(spreads) for spreads in found], [batch for spreads in found for one in spreads for batch in one.batches]


@pytest.mark.parametrize("name", ["grpo", "rloo", "gspo"])
def test_groups_are_trained_on_as_they_come(name: str) -> None:
    counts, batches = fed({"name": name})
    assert counts[1] > 0
    assert sum(len(batch.lengths_S) for batch in batches) == 8


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "reinforce_pp"},
        {"name": "reinforce_pp_baseline"},
        {"name": "m2po"},
        {"name": "grpo", "advantage": {"scale": "batch_std"}},
    ],
    ids=str,
)
def test_what_depends_on_the_whole_update_waits_for_it(algorithm: dict[str, Any]) -> None:
    counts, batches = fed(algorithm)
    assert counts[:3] == [0, 0, 0]
    assert sum(len(batch.lengths_S) for batch in batches) == 8
    assert all(batch.tokens <= TRAINER["micro_batch_tokens"] for batch in batches)


def test_waiting_changes_only_when() -> None:
    _, early = fed({"name": "grpo"})
    _, late = fed({"name": "m2po"})
    for left, right in zip(early, late, strict=True):
        np.testing.assert_array_equal(left.ids_T, right.ids_T)
        np.testing.assert_array_equal(left.advantages_N, right.advantages_N)


def test_whitened_advantages_of_all_micro_batches_have_mean_0_and_deviation_1() -> None:
    _, batches = fed({"name": "reinforce_pp_baseline"})
    values = np.concatenate([batch.advantages_N for batch in batches])
    np.testing.assert_allclose([values.mean(), values.std(ddof=1)], [0, 1], atol=1e-6)
