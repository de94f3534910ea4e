"""The rewards that come along."""

from __future__ import annotations

import pytest

from services.reward.rewards import exact_match
from services.reward.rewards.reasoning_gym import score as gym_score


def test_exact_match() -> None:
    assert exact_match.score(" 42 ", 42, "stop") == 1
    assert exact_match.score(" 42 ", 42, "stop", strip=False) == 0
    assert exact_match.score("Yes", "yes", "stop", ignore_case=True) == 1
    assert exact_match.score("42", "42", "length") == 1
    assert exact_match.score("42", "42", "length", must_end=True) == 0
    with pytest.raises(ValueError, match="no answer"):
        exact_match.score("42", None, "stop")


def test_reasoning_gym_between_tags() -> None:
    meta = {"reasoning_gym": {"task": "chain_sum", "seed": 3, "size": 5, "index": 0, "options": {}}}
    assert gym_score("thinking... <answer>1</answer> <answer> 214 </answer>", meta, tag="answer") == 1
    assert gym_score("214", meta, tag="answer") == 0
    assert gym_score(" 214\n", meta) == 1
    with pytest.raises(ValueError, match="needs prompts of a reasoning_gym"):
        gym_score("214", {})
