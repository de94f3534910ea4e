"""The preference phase (DPO): the policy learns from pairs of a better and a worse completion, before reinforcement learning.

The reference is the policy as the phase finds it: its log-probabilities of all pairs are taken before the first update, so no
second model is held. Both completions of a pair stay in one micro-batch. Like the supervised phase it has an optimiser of its
own, and the same seed, weights and pairs give the same weights. Learning is checked by tests/trainer/test_preferences.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np

from services.trainer.algorithms.reductions import merge
from services.trainer.batches import TrainSample
from services.trainer.objectives import Objective
from services.trainer.ranks import RankedPolicy
from services.trainer.schedule import learning_rate
from services.trainer.spread import spread
from shared.sections import PreferencesConfig

Pair = tuple[TrainSample, TrainSample]
"""The better and the worse completion of one prompt."""


@dataclass(frozen=True, slots=True)
class PreferenceStep:
    """One update of the phase, for progress reports."""

    step: int
    """From 1."""
    steps: int
    loss: float
    accuracy: float
    """Share of pairs whose better completion has gained more than the worse one."""
    grad_norm: float
    lr: float


def preference_pair(prompt: Sequence[int], better: Sequence[int], worse: Sequence[int], name: str) -> Pair:
    """Token ids as samples. `name` tells a person which pair it was."""

    def sample(completion: Sequence[int], side: float) -> TrainSample:
        size = len(completion)
        return TrainSample(
            group_id=name,
            ids=np.asarray([*prompt, *completion], dtype=np.int64),
            prompt_len=len(prompt),
            mask=np.ones(size, dtype=np.uint8),
            logprobs=np.zeros(size, dtype=np.float32),
            advantage=0.0,
            extras={"chosen": np.full(size, side, dtype=np.float32)},
        )

    return sample(better, 1.0), sample(worse, -1.0)


def numbered(pair: Pair, number: int) -> Pair:
    """The pair with the column that keeps it apart from others of its batch, which may be copies of it."""
    better, worse = (
        replace(sample, extras={**sample.extras, "pair": np.full(len(sample.mask), number, dtype=np.int64)})
        for sample in pair
    )
    return better, worse


def with_reference(policy: RankedPolicy, pairs: Sequence[Pair], token_budget: int) -> list[Pair]:
    """The pairs with the column `reference_logprobs`, as the policy is now."""
    samples = [sample for pair in pairs for sample in pair]
    ends = np.cumsum([len(sample.mask) for sample in samples])
    starts = ends - [len(sample.mask) for sample in samples]
    reference = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.float32)
    places = [
        replace(sample, extras={"place": np.arange(start, end)})
        for sample, start, end in zip(samples, starts, ends, strict=True)
    ]
    for one in spread(((place,) for place in places), token_budget, policy.layout):
        for batch, scores in zip(one.batches, policy.score(one), strict=True):
            reference[batch.extras["place"]] = scores.logprobs_N.float().cpu().numpy()
    known = [
        replace(sample, extras={**sample.extras, "reference_logprobs": reference[start:end]})
        for sample, start, end in zip(samples, starts, ends, strict=True)
    ]
    return list(zip(known[::2], known[1::2], strict=True))


def run_preferences(
    policy: RankedPolicy,
    pairs: Iterable[Pair],
    options: PreferencesConfig,
    *,
    token_budget: int,
    on_step: Callable[[PreferenceStep], None] = lambda _step: None,
) -> int:
    """Train on batches of pairs; the number of updates done. A list of pairs is gone through again when it ends."""
    wanted = options.steps * options.batch
    known = with_reference(policy, list(islice(pairs, wanted)), token_budget)
    policy.reset_optimizer(options.optimizer)
    loss = Objective("dpo", constants={"beta": options.beta, "label_smoothing": options.label_smoothing})
    stream = cycle(known)
    for step in range(options.steps if known else 0):
        chosen = (numbered(pair, number) for number, pair in enumerate(islice(stream, options.batch)))
        sums = merge(policy.forward_backward(one, loss) for one in spread(chosen, token_budget, policy.layout))
        rate = learning_rate(step, options.steps, options.optimizer)
        outcome = policy.update(sums["denominator"], rate)
        mean, accuracy = sums["loss"] / sums["pairs"], sums["pair_accuracy"] / sums["pairs"]
        on_step(PreferenceStep(step + 1, options.steps, mean, accuracy, outcome["grad_norm"], rate))
    return options.steps if known else 0
