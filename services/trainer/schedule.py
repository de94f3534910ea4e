"""Learning-rate schedules: pure functions of the step.

Warm-up rises linearly and reaches the peak at update `warmup_steps` (counted from 0); then the rate stays, or falls to
`min_lr_ratio` of the peak at the last update, along a line or half a cosine. Checked by tests/trainer/test_schedule.py.
"""

from __future__ import annotations

import math

from shared.sections import OptimizerConfig


def learning_rate(step: int, total_steps: int, options: OptimizerConfig) -> float:
    """The rate of update `step` (from 0) out of `total_steps`."""
    if step < options.warmup_steps:
        return options.lr * (step + 1) / (options.warmup_steps + 1)
    if options.schedule == "constant":
        return options.lr
    span = max(1, total_steps - 1 - options.warmup_steps)
    progress = min(1.0, (step - options.warmup_steps) / span)
    fall = progress if options.schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return options.lr * (1 - (1 - options.min_lr_ratio) * fall)
