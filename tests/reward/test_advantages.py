"""Advantages of one group against independent numbers, and the groups that make naive formulas explode."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.advantages import group_advantages, shaped_rewards
from services.reward.advantages.group import group
from services.reward.advantages.leave_one_out import leave_one_out
from services.reward.advantages.overlong import overlong_penalty
from shared.algorithms import AdvantageConfig, DapoConfig, GrpoConfig

ARCHIVE = np.load(Path(__file__).parents[1] / "data/loss_cases.npz")
REWARDS = ARCHIVE["adv/rewards"]


def test_the_archive_has_a_missing_score():
    assert np.isnan(REWARDS).sum() == 1
    assert json.loads(str(ARCHIVE["meta"]))["cases"]


@pytest.mark.parametrize("row", range(len(REWARDS)))
def test_groups_of_the_archive(row):
    rewards = REWARDS[row]
    np.testing.assert_allclose(group(rewards, "std", 1e-4), ARCHIVE["adv/group_std_eps1e-4"][row], rtol=0, atol=1e-9)
    np.testing.assert_allclose(group(rewards, "none"), ARCHIVE["adv/no_scale"][row], rtol=0, atol=1e-9)
    theirs = ARCHIVE["adv/rloo_nan_as_0"][row]  # TRL reads a missing score as 0
    np.testing.assert_allclose(leave_one_out(np.nan_to_num(rewards)), theirs, rtol=0, atol=1e-9)


def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others():
    rewards = np.array([1.0, 0.0, np.nan, 3.0])
    expected = [1 - (0 + 3) / 2, 0 - (1 + 3) / 2, 0.0, 3 - (1 + 0) / 2]
    np.testing.assert_allclose(leave_one_out(rewards), expected, atol=1e-12)


def test_scales():
    rewards = np.array([0.0, 1.0, 1.0, 2.0])
    centred = rewards - 1
    np.testing.assert_allclose(group(rewards, "population_std", 1e-6), centred / (np.sqrt(0.5) + 1e-6))
    np.testing.assert_allclose(group(rewards, "mean"), centred / 1.0)
    np.testing.assert_allclose(group(rewards, "batch_std"), centred)
    assert (group(np.array([-2.0, 0.0, 1.0]), "mean") == 0).all(), "a mean that is not above 0 scales nothing"


@pytest.mark.parametrize("scale", ["std", "population_std", "batch_std", "mean", "none"])
@pytest.mark.parametrize("rewards", [[0.7], [0.1, 0.1, 0.1], [np.nan, 0.3], [np.nan, np.nan], [0.1, np.nan, 0.1], []])
def test_groups_that_teach_nothing_give_exact_zeros(rewards, scale):
    rewards = np.array(rewards, dtype=np.float32)
    for name in ("group", "leave_one_out"):
        advantages = group_advantages(rewards, AdvantageConfig(name=name, scale=scale))
        assert advantages.dtype == np.float32
        assert (advantages == 0).all(), "a group of one, or of equal scores, has nothing to compare"


@settings(deadline=None)
@given(st.lists(st.floats(-10, 10) | st.just(float("nan")), min_size=2, max_size=9), st.randoms())
def test_order_does_not_matter_and_a_missing_score_gets_nothing(rewards, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    rewards = np.array(rewards)
    for options in (AdvantageConfig(), AdvantageConfig(scale="none"), AdvantageConfig(name="leave_one_out")):
        advantages = group_advantages(rewards, options)
        assert np.isfinite(advantages).all()
        assert (advantages[np.isnan(rewards)] == 0).all()
        np.testing.assert_allclose(advantages[order], group_advantages(rewards[order], options), atol=1e-5)
        assert abs(float(advantages.sum())) < 1e-3


@pytest.mark.parametrize("name", ["reward", "returns", "gae"])
def test_what_the_trainer_goes_on_from_is_the_score(name):
    advantages = group_advantages(np.array([0.5, np.nan, -1.0]), AdvantageConfig(name=name))
    assert advantages.tolist() == [0.5, 0.0, -1.0]


def test_overlong_shaping_falls_linearly_inside_the_buffer():
    lengths = np.array([0, 80, 90, 100])
    np.testing.assert_allclose(overlong_penalty(lengths, limit=100, buffer=20, penalty=1.0), [0, 0, 0.5, 1])
    rewards = np.array([1.0, 1.0, 1.0, np.nan], dtype=np.float32)
    shaped = shaped_rewards(rewards, lengths, DapoConfig(overlong_buffer=20, overlong_penalty=0.5), 100)
    np.testing.assert_allclose(shaped, [1, 1, 0.75, np.nan])
    assert shaped_rewards(rewards, lengths, GrpoConfig(), 100).tolist()[:3] == [1, 1, 1]
