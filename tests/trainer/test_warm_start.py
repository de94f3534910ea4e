"""The supervised phase learns a pattern, reports its progress, and repeats to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from services.trainer.warm_start import WarmStep, run_warm_start
from shared.sections import OptimizerConfig, WarmStartConfig

END = 1
DEMONSTRATIONS = [([a, b], [b, a, END]) for a in range(2, 8) for b in range(2, 8)]
"""Say it backwards."""
OPTIONS = WarmStartConfig(
    source="unused.here",
    steps=30,
    batch=24,
    optimizer=OptimizerConfig(lr=2e-2, betas=(0.9, 0.98), schedule="linear", warmup_steps=5),
)


def warm(policy: Any, demonstrations: Any = DEMONSTRATIONS, options: WarmStartConfig = OPTIONS) -> list[WarmStep]:
    seen: list[WarmStep] = []
    done = run_warm_start(policy, demonstrations, options, token_budget=60, on_step=seen.append)
    assert done == len(seen)
    return seen


def test_learns_and_reports(make_policy: Callable[..., Any]) -> None:
    seen = warm(make_policy())
    assert [step.step for step in seen] == list(range(1, 31))
    assert seen[-1].loss < 0.2 * seen[0].loss
    assert seen[0].tokens == 24 * 3
    assert max(step.lr for step in seen) == seen[5].lr == 2e-2


def test_repeats_to_the_bit(make_policy: Callable[..., Any]) -> None:
    first, second = make_policy(), make_policy()
    assert warm(first) == warm(second, iter(DEMONSTRATIONS * 20))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first.hf_tensors(), second.hf_tensors(), strict=True))


def test_an_iterator_that_ends_ends_the_phase(make_policy: Callable[..., Any]) -> None:
    assert len(warm(make_policy(), iter(DEMONSTRATIONS))) == 2
    assert warm(make_policy(), []) == []
