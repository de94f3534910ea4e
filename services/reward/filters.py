"""Which groups are not worth training on. Pure functions of a scored group; the name of the first that applies is the reason.

    unscorable     no sample could be scored
    truncated      every sample was cut off at the limit
    zero_variance  all scored samples have the same reward, so that every advantage is 0

A group taken out gives its credit back and another prompt takes its place: a batch is never short.
`tests/reward/test_filters.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from shared.records import Group, Rewards, Samples


def unscorable(samples: Samples, rewards: Rewards) -> bool:
    return bool(np.isnan(rewards.total).all())


def truncated(samples: Samples, rewards: Rewards) -> bool:
    return all(finish != "stop" for finish in samples.finish)


def zero_variance(samples: Samples, rewards: Rewards) -> bool:
    scored = rewards.total[~np.isnan(rewards.total)]
    return len(scored) > 0 and bool(scored.min() == scored.max())


FILTERS: dict[str, Callable[[Samples, Rewards], bool]] = {
    "unscorable": unscorable,
    "truncated": truncated,
    "zero_variance": zero_variance,
}


def drop_reason(group: Group, names: Iterable[str]) -> str:
    """The first of the filters `names` that takes the group out, or ''. The group must hold samples and rewards."""
    assert group.samples is not None
    assert group.rewards is not None
    for name in names:
        if FILTERS[name](group.samples, group.rewards):
            return name
    return ""
