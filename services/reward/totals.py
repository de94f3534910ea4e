"""From the outcomes of single calls to the group's rewards. Pure.

The reward is the weighted sum of the functions' scores. A call that gave none leaves its part NaN, and the sum with it: the
sample has no advantage. With `on_error: zero` its part is 0 instead. The error is kept with the sample either way.
`tests/reward/test_filters.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from services.reward.scoring import Outcome
from shared.config import ConfigError
from shared.records import Rewards, floats
from shared.sections import RewardConfig


def names_of(config: RewardConfig) -> list[str]:
    """The functions' names in metrics and records."""
    names = [one.name or one.path.rpartition(".")[2] for one in config.functions]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ConfigError(
                f"reward.functions[{number}].name: {name!r} is taken by an earlier one; give this one a name"
            )
    return names


def combine(outcomes: Sequence[Sequence[Outcome]], config: RewardConfig, names: Sequence[str]) -> Rewards:
    """`outcomes[function][sample]`."""
    missing = 0.0 if config.on_error == "zero" else float("nan")
    parts = {
        name: floats([missing if one.score is None else one.score for one in found])
        for name, found in zip(names, outcomes, strict=True)
    }
    weights = [function.weight for function in config.functions]
    total = sum(weight * part.astype(np.float64) for weight, part in zip(weights, parts.values(), strict=True))
    errors = [
        "; ".join(f"{name}: {one.error}" for name, one in zip(names, sample, strict=True) if one.error)
        for sample in zip(*outcomes, strict=True)
    ]
    return Rewards(total=floats(total), parts=parts, errors=errors)


def kinds(outcomes: Sequence[Sequence[Outcome]]) -> Counter[str]:
    """Errors by kind."""
    return Counter(one.kind for found in outcomes for one in found if one.kind)
