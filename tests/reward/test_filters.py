"""Filters, and how single outcomes become a group's rewards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.reward.filters import FILTERS, drop_reason
from services.reward.scoring import Outcome
from services.reward.totals import combine, kinds, names_of
from shared.config import ConfigError
from shared.records import Group, Rewards, Samples, Sampling, floats, ints
from shared.sections import RewardConfig

NAN = float("nan")


def group(totals: list[float], finish: list[str] | None = None) -> Group:
    count = len(totals)
    samples = Samples(
        lengths=ints([1] * count),
        ids=ints([5] * count),
        logprobs=floats([-1] * count),
        mask=np.ones(count, dtype="|u1"),
        finish=finish or ["stop"] * count,
        texts=["x"] * count,
        span_sample=ints(range(count)),
        span_start=ints([0] * count),
        span_end=ints([1] * count),
        span_version=ints([1] * count),
        span_step=ints([0] * count),
    )
    rewards = Rewards(floats(totals), {}, [""] * count)
    sampling = Sampling(count, 4)
    return Group("0-0", "train", 0, 0, 0, "p", None, {}, sampling, ints([1]), samples=samples, rewards=rewards)


@pytest.mark.parametrize(
    ("totals", "finish", "reason"),
    [
        ([0, 1], None, ""),
        ([1, 1], None, "zero_variance"),
        ([1, NAN], None, "zero_variance"),
        ([NAN, NAN], None, "unscorable"),
        ([0, 1], ["length", "length"], "truncated"),
        ([0, 1], ["length", "stop"], ""),
        ([NAN, NAN], ["length", "length"], "unscorable"),
    ],
)
def test_filters(totals: list[float], finish: list[str] | None, reason: str) -> None:
    assert drop_reason(group(totals, finish), FILTERS) == reason
    assert drop_reason(group(totals, finish), []) == ""


def test_only_the_named_ones_act_and_the_first_gives_the_reason() -> None:
    bad = group([NAN, NAN], ["length", "length"])
    assert drop_reason(bad, ["zero_variance"]) == ""
    assert drop_reason(bad, ["truncated", "unscorable"]) == "truncated"


def config(on_error: str = "unscorable", *functions: dict[str, Any]) -> RewardConfig:
    return RewardConfig.model_validate({"functions": list(functions), "on_error": on_error})


FIRST, SECOND = {"path": "m.first", "weight": 2.0}, {"path": "m.second", "name": "style", "weight": -0.5}
OUTCOMES = [
    [Outcome(1.0), Outcome(0.0), Outcome(None, "timeout", "took too long")],
    [Outcome(1.0), Outcome(None, "raised", "raised X"), Outcome(None, "raised", "raised Y")],
]


def test_weighted_sum_and_errors() -> None:
    settings = config("unscorable", FIRST, SECOND)
    rewards = combine(OUTCOMES, settings, names_of(settings))
    np.testing.assert_array_equal(rewards.total, floats([1.5, NAN, NAN]))
    np.testing.assert_array_equal(rewards.parts["first"], floats([1, 0, NAN]))
    np.testing.assert_array_equal(rewards.parts["style"], floats([1, NAN, NAN]))
    assert rewards.errors == ["", "style: raised X", "first: took too long; style: raised Y"]
    assert kinds(OUTCOMES) == {"timeout": 1, "raised": 2}


def test_an_error_may_count_as_zero() -> None:
    settings = config("zero", FIRST, SECOND)
    rewards = combine(OUTCOMES, settings, names_of(settings))
    assert rewards.total.tolist() == [1.5, 0.0, 0.0]
    assert rewards.errors[1] == "style: raised X"


def test_names_must_differ() -> None:
    with pytest.raises(ConfigError, match=r"reward\.functions\[1\]\.name: 'first' is taken"):
        names_of(config("zero", FIRST, {"path": "other.first"}))
