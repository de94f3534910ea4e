"""Losses, one file each: pure functions from tokens to (sum to be minimised, metric sums).

`policy_loss` is the only place where a run file's `algorithm.name` becomes a function. A new algorithm is a new file, one
line in `LOSSES`, and its fields in `AlgorithmConfig`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from services.trainer.algorithms.grpo import grpo
from services.trainer.algorithms.reductions import Loss
from shared.config import AlgorithmConfig


def _grpo(config: AlgorithmConfig) -> Loss:
    return partial(
        grpo,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        old_logprobs=config.old_logprobs,
        tis_cap=config.tis_cap,
    )


LOSSES: dict[str, Callable[[AlgorithmConfig], Loss]] = {"grpo": _grpo}
"""`algorithm.name` of the run file -> its loss with the run file's settings."""


def policy_loss(config: AlgorithmConfig) -> Loss:
    """The loss that the run file asks for."""
    return LOSSES[config.name](config)
