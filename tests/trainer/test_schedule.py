"""Learning-rate schedules at the points that matter: first, peak, last, and beyond."""

from __future__ import annotations

import pytest

from services.trainer.schedule import learning_rate
from shared.sections import OptimizerConfig


def rates(total: int, **options: object) -> list[float]:
    config = OptimizerConfig(lr=1.0, **options)  # type: ignore[arg-type]
    return [learning_rate(step, total, config) for step in range(total)]


def test_constant() -> None:
    assert rates(5) == [1.0] * 5


def test_warm_up_rises_linearly_to_the_peak() -> None:
    assert rates(5, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_ends_at_the_ratio() -> None:
    assert rates(5, schedule="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    found = rates(9, schedule="cosine", min_lr_ratio=0.0)
    assert found[0] == 1.0
    assert found[4] == pytest.approx(0.5)
    assert found[8] == pytest.approx(0.0)
    assert found == sorted(found, reverse=True)


def test_steps_beyond_the_end_and_runs_of_one_step() -> None:
    config = OptimizerConfig(lr=1.0, schedule="linear", min_lr_ratio=0.1, warmup_steps=2)
    assert learning_rate(50, 10, config) == pytest.approx(0.1)
    assert rates(1, schedule="linear") == [1.0]
