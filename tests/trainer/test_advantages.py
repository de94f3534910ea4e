"""What the trainer adds to advantages, against plain loops over independent formulas, and what must not matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.advantages import group_advantages, shaped_rewards
from services.trainer.advantages import gae, needs_whole_update, token_advantages
from shared.config import RunConfig
from shared.records import Group, Rewards, Samples, Sampling, floats, ints

ARCHIVE = np.load(Path(__file__).parents[1] / "data/loss_cases.npz")
NAN = float("nan")


def run_of(algorithm: dict[str, Any], **changes: Any) -> RunConfig:
    base: dict[str, Any] = {
        "run": "demo",
        "steps": 4,
        "groups_per_step": 4,
        "samples_per_group": 4,
        "model": {"path": "model"},
        "prompts": {"source": "prompts.jsonl"},
        "reward": {"functions": [{"path": "task.reward"}]},
        "algorithm": algorithm,
    }
    return RunConfig.model_validate({**base, **changes})


def group_of(
    rewards: list[float],
    lengths: list[int],
    run: RunConfig,
    *,
    number: int = 0,
    mask: Any = None,
    logprobs: Any = None,
    **columns: Any,
) -> Group:
    """A group as the reward service leaves it, with the columns that stages have added."""
    total = sum(lengths)
    rng = np.random.default_rng(number)
    samples = Samples(
        lengths=ints(lengths),
        ids=ints(rng.integers(0, 9, total)),
        logprobs=floats(rng.normal(-2, 0.5, total) if logprobs is None else logprobs),
        mask=np.asarray(np.ones(total) if mask is None else mask, dtype="|u1"),
        finish=["stop"] * len(lengths),
        texts=[""] * len(lengths),
        span_sample=ints([i for i, n in enumerate(lengths) if n]),
        span_start=ints([0 for n in lengths if n]),
        span_end=ints([n for n in lengths if n]),
        span_version=ints([1 for n in lengths if n]),
        span_step=ints([0 for n in lengths if n]),
    )
    scores = Rewards(floats(rewards), {}, [""] * len(rewards))
    shaped = shaped_rewards(scores.total, samples.lengths, run.algorithm, run.sampling.max_new_tokens)
    return Group(
        id=f"0-{number}",
        kind="train",
        issue=number,
        seat=number,
        min_step=0,
        prompt="p",
        answer=None,
        meta={},
        sampling=Sampling(n=len(lengths), max_new_tokens=8),
        prompt_ids=ints([1, 2]),
        samples=samples,
        rewards=scores,
        advantages=group_advantages(shaped, run.algorithm.advantage),
        columns={name: floats(column) for name, column in columns.items()},
    )


def tokens_of(group: Group, found: Any, sample: int) -> np.ndarray:
    assert group.samples is not None
    start, end = group.samples.offsets[sample : sample + 2]
    return found.advantages_N[start:end]


def test_a_plain_group_keeps_what_the_reward_service_computed() -> None:
    run = run_of({"name": "grpo"})
    group = group_of([1.0, 0.0, NAN, 0.0], [2, 1, 3, 0], run)
    (found,) = token_advantages([group], run)
    assert group.advantages is not None
    expected = np.repeat(group.advantages, [2, 1, 3, 0])
    np.testing.assert_array_equal(found.advantages_N, expected)
    assert found.returns_N is None
    assert not needs_whole_update(run)


def test_advantages_by_token_pass_through_where_a_token_is_trained() -> None:
    run = run_of({"name": "grpo"})
    group = group_of([1.0, 0.0], [3, 1], run, mask=[1, 0, 1, 1])
    group.advantages = floats([0.5, 9.0, -0.5, 0.25])
    (found,) = token_advantages([group], run)
    assert found.advantages_N.tolist() == [0.5, 0.0, -0.5, 0.25]


def test_batch_deviation_of_the_archive() -> None:
    run = run_of({"name": "grpo", "advantage": {"scale": "batch_std"}})
    assert needs_whole_update(run)
    rewards = ARCHIVE["adv/rewards"]
    groups = [group_of(row.tolist(), [1] * len(row), run, number=i) for i, row in enumerate(rewards)]
    ours = np.stack([found.advantages_N for found in token_advantages(groups, run)])
    np.testing.assert_allclose(ours, ARCHIVE["adv/batch_std_eps1e-4"], rtol=0, atol=2e-7)  # columns are float32


def test_returns_pass_over_what_an_environment_wrote() -> None:
    """Two turns: the first turn's tokens keep their credit (verl's running product would lose it)."""
    run = run_of({"name": "reinforce_pp", "advantage": {"whiten": False, "gamma": 0.5}})
    group = group_of([8.0, 0.0], [6, 1], run, mask=[1, 1, 0, 0, 1, 1, 1])
    (found,) = token_advantages([group], run)
    np.testing.assert_allclose(tokens_of(group, found, 0), [1, 2, 0, 0, 4, 8])


def test_kl_in_the_reward_by_token_and_by_sample() -> None:
    reference = {"reference": {}, "samples_per_group": 2}
    logprobs, ref = [-1.0, -2.0, -1.5, -1.0], [-1.5, -2.5, -1.0, -3.0]
    kl = 0.1 * (np.array(logprobs) - np.array(ref))  # k1
    run = run_of({"name": "reinforce_pp", "advantage": {"whiten": False}, "kl": {"coef": 0.1}}, **reference)
    group = group_of([1.0, 0.0], [3, 1], run, logprobs=logprobs, reference_logprobs=ref)
    (found,) = token_advantages([group], run)
    np.testing.assert_allclose(tokens_of(group, found, 0), [1 - kl[:3].sum(), 1 - kl[1:3].sum(), 1 - kl[2]], atol=1e-6)
    np.testing.assert_allclose(tokens_of(group, found, 1), [-kl[3]], atol=1e-6)
    run = run_of({"name": "rloo", "kl": {"coef": 0.1, "use": "reward", "estimator": "k1"}}, **reference)
    group = group_of([1.0, 0.0], [3, 1], run, logprobs=logprobs, reference_logprobs=ref)
    (found,) = token_advantages([group], run)
    first, second = 1 - kl[:3].sum(), 0 - kl[3]
    np.testing.assert_allclose(found.advantages_N, [first - second] * 3 + [second - first], atol=1e-6)


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    out, following, running = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + gamma * following - value + gamma * lam * running
        following = value
        out.append(running)
    return out[::-1]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.floats(0.5, 1), st.floats(0, 1), st.integers(0, 99))
def test_gae_is_the_textbooks_recursion(counts: list[int], gamma: float, lam: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    width = max(counts)
    rewards, values = rng.normal(size=(2, len(counts), width))
    advantages, returns = gae(rewards, values, np.array(counts), gamma, lam)
    for row, count in enumerate(counts):
        expected = plain_gae(rewards[row, :count].tolist(), values[row, :count].tolist(), gamma, lam)
        np.testing.assert_allclose(advantages[row, :count], expected, atol=1e-9)
        np.testing.assert_allclose(returns[row, :count], np.array(expected) + values[row, :count], atol=1e-9)


def test_ppo_puts_the_score_at_the_last_trained_token_and_whitens() -> None:
    options = {"name": "ppo", "advantage": {"whiten": False, "gamma": 0.9, "lam": 0.8}}
    run = run_of(options, critic={})
    values = [0.5, 0.1, 9.0, 0.2, 0.3, 0.4]
    group = group_of([2.0, NAN], [5, 1], run, mask=[1, 1, 0, 1, 1, 1], values=values)
    (found,) = token_advantages([group], run)
    expected = plain_gae([0, 0, 0, 2.0], [0.5, 0.1, 0.2, 0.3], 0.9, 0.8)
    np.testing.assert_allclose(found.advantages_N, [*expected[:2], 0, *expected[2:], 0], atol=1e-6)
    assert found.returns_N is not None
    np.testing.assert_allclose(found.returns_N[[0, 1, 3, 4]], np.add(expected, [0.5, 0.1, 0.2, 0.3]), atol=1e-6)
    assert found.returns_N[5] == np.float32(0.4), "a sample without a score teaches the critic nothing"
    whitened = token_advantages([group], run_of({"name": "ppo"}, critic={}))[0].advantages_N
    trained = whitened[[0, 1, 3, 4]]
    np.testing.assert_allclose([trained.mean(), trained.std(ddof=1)], [0, 1], atol=1e-6)
    assert (whitened[[2, 5]] == 0).all()


BATCH = [
    {"name": "reinforce_pp"},
    {"name": "reinforce_pp_baseline"},
    {"name": "grpo", "advantage": {"scale": "batch_std"}},
    {"name": "grpo", "advantage": {"whiten": True}},
]


@pytest.mark.parametrize("algorithm", BATCH, ids=lambda one: one["name"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_order_of_groups_and_padding_change_nothing(algorithm: dict[str, Any], data: st.DataObject) -> None:
    """The same groups in another order, with tokens of an environment put in between: the same advantages."""
    run = run_of(algorithm)
    shapes = data.draw(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=3), min_size=1, max_size=4))
    scores = st.sampled_from([0.0, 1.0, 0.5, NAN])
    rewards = [data.draw(st.lists(scores, min_size=len(s), max_size=len(s))) for s in shapes]
    groups = [group_of(r, s, run, number=i) for i, (r, s) in enumerate(zip(rewards, shapes, strict=True))]
    plain = token_advantages(groups, run)
    for found, reward, shape in zip(plain, rewards, shapes, strict=True):
        assert np.isfinite(found.advantages_N).all()
        assert (found.advantages_N[np.repeat(np.isnan(reward), shape)] == 0).all()
    order = data.draw(st.permutations(range(len(groups))))
    shuffled = token_advantages([groups[i] for i in order], run)
    for place, number in enumerate(order):
        np.testing.assert_allclose(shuffled[place].advantages_N, plain[number].advantages_N, atol=1e-5)
    wide = [
        group_of(r, [2 * n for n in s], run, number=i, mask=np.tile([1, 0], sum(s)), logprobs=np.full(2 * sum(s), -1.0))
        for i, (r, s) in enumerate(zip(rewards, shapes, strict=True))
    ]
    for found, other in zip(plain, token_advantages(wide, run), strict=True):
        np.testing.assert_allclose(other.advantages_N[::2], found.advantages_N, atol=1e-5)
        assert (other.advantages_N[1::2] == 0).all()


@pytest.mark.parametrize("algorithm", BATCH, ids=lambda one: one["name"])
@pytest.mark.parametrize("rewards", [[0.3, 0.3], [NAN, NAN], [NAN, 1.0], [0.0, 0.0]])
def test_an_update_without_signal_gives_finite_advantages(algorithm: dict[str, Any], rewards: list[float]) -> None:
    run = run_of(algorithm)
    found = token_advantages([group_of(rewards, [2, 3], run)], run)
    assert np.abs(found[0].advantages_N).max() < 1e-6 or algorithm["name"] == "reinforce_pp"
    assert np.isfinite(found[0].advantages_N).all()


def test_tokens_with_a_number_that_is_not_finite_take_no_part() -> None:
    run = run_of({"name": "reinforce_pp_baseline"})
    clean = group_of([1.0, 0.0], [2, 2], run)
    spoilt = group_of([1.0, 0.0], [3, 2], run, logprobs=[-1.0, NAN, -1.0, -1.0, -1.0])
    found, expected = token_advantages([spoilt], run)[0], token_advantages([clean], run)[0]
    np.testing.assert_allclose(found.advantages_N[[0, 2, 3, 4]], expected.advantages_N, atol=1e-6)
    assert found.advantages_N[1] == 0


def test_a_missing_column_is_refused_by_name() -> None:
    run = run_of({"name": "ppo"}, critic={})
    with pytest.raises(ValueError, match="0-0: the column 'values' is missing; its stage must add it"):
        token_advantages([group_of([1.0, 0.0], [2, 2], run)], run)
    with pytest.raises(ValueError, match=r"the column 'values' has the shape \(4, 2\)"):
        token_advantages([group_of([1.0, 0.0], [2, 2], run, values=np.zeros((4, 2)))], run)


def test_no_tokens_at_all() -> None:
    for algorithm, changes in [*((one, {}) for one in BATCH), ({"name": "ppo"}, {"critic": {}})]:
        run = run_of(algorithm, **changes)
        (found,) = token_advantages([group_of([1.0, 0.0], [0, 0], run, values=[])], run)
        assert len(found.advantages_N) == 0
