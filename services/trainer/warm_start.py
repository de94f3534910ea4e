"""The supervised phase before reinforcement learning: teaches the policy the form of an answer from demonstrations.

It uses the trainer's own policy and packing, with an optimiser of its own whose moments are not carried over. Same seed,
weights and demonstrations give the same weights. Learning is checked by tests/trainer/test_warm_start.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from services.trainer.algorithms.reductions import finish, merge
from services.trainer.batches import TrainSample
from services.trainer.objectives import SFT
from services.trainer.ranks import RankedPolicy
from services.trainer.schedule import learning_rate
from services.trainer.spread import spread
from shared.sections import WarmStartConfig

Demonstration = tuple[Sequence[int], Sequence[int]]
"""(prompt ids, completion ids); the completion ends with the end-of-text id if the policy shall learn to stop."""


@dataclass(frozen=True, slots=True)
class WarmStep:
    """One supervised update, for progress reports."""

    step: int
    """From 1."""
    steps: int
    loss: float
    """Mean cross-entropy of a completion token."""
    grad_norm: float
    lr: float
    tokens: int


def run_warm_start(
    policy: RankedPolicy,
    demonstrations: Iterable[Demonstration],
    options: WarmStartConfig,
    *,
    token_budget: int,
    on_step: Callable[[WarmStep], None] = lambda _step: None,
) -> int:
    """Train on batches of demonstrations; the number of updates done.

    A sequence is gone through again when it ends; an iterator that ends before `options.steps` ends the phase. The policy's
    optimiser is replaced and must be reset for what follows.
    """
    policy.reset_optimizer(options.optimizer)
    stream = _repeat(demonstrations)
    for step in range(options.steps):
        batch = [_sample(demonstration) for demonstration in islice(stream, options.batch)]
        if not batch:
            return step
        units = ((sample,) for sample in batch)
        sums = merge(policy.forward_backward(one, SFT) for one in spread(units, token_budget, policy.layout))
        rate = learning_rate(step, options.steps, options.optimizer)
        outcome = policy.update(sums["denominator"], rate)
        on_step(
            WarmStep(
                step + 1, options.steps, finish(sums)["loss"], outcome["grad_norm"], rate, tokens=int(sums["tokens"])
            )
        )
    return options.steps


def _repeat(demonstrations: Iterable[Demonstration]) -> Iterator[Demonstration]:
    yield from demonstrations
    while isinstance(demonstrations, Sequence) and demonstrations:
        yield from demonstrations


def _sample(demonstration: Demonstration) -> TrainSample:
    prompt, completion = demonstration
    count = len(completion)
    return TrainSample(
        group_id="demonstration",
        ids=np.concatenate([np.asarray(prompt, dtype=np.int64), np.asarray(completion, dtype=np.int64)]),
        prompt_len=len(prompt),
        mask=np.ones(count, dtype=np.uint8),
        logprobs=np.zeros(count, dtype=np.float32),
        advantage=0.0,
    )
