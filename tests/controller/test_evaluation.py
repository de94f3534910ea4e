"""When evaluations are due, what they give, and how a run's end is judged."""

from __future__ import annotations

from services.controller.credits import HOPELESS_ROUNDS, Credits, Rules
from services.controller.evaluation import Evaluations
from services.controller.finish import Verdict, judge
from services.controller.stats import Stats
from shared.records import Receipt, ints


def evaluated(step: int, index: int, reward: float | None, drawn: int = 0) -> Receipt:
    return Receipt("evaluated", f"eval-{step}-{index}", reward=reward, sample_steps=ints([drawn, drawn + 1, -1]))


def score(evaluations: Evaluations, step: int, *rewards: float | None) -> None:
    for index, reward in enumerate(rewards):
        evaluations.apply(evaluated(step, index, reward))


def test_before_the_first_every_so_often_and_after_the_last() -> None:
    evaluations = Evaluations(steps=25, every=10, prompts=1)
    begun = []
    for step in range(26):
        if (mark := evaluations.due(step)) is not None:
            evaluations.started(mark)
            begun.append((step, mark))
            score(evaluations, mark, 1.0)
        assert evaluations.due(step) is None
    assert begun == [(0, 0), (10, 10), (20, 20), (25, 25)]


def test_slow_evaluations_do_not_pile_up_but_the_last_is_never_left_out() -> None:
    evaluations = Evaluations(steps=30, every=5, prompts=2)
    assert evaluations.due(0) == 0
    evaluations.started(0)
    assert [evaluations.due(step) for step in (5, 10, 17)] == [None] * 3
    score(evaluations, 0, 1.0, None)
    assert evaluations.due(18) == 15
    evaluations.started(15)
    assert evaluations.due(29) is None
    assert evaluations.due(30) == 30


def test_one_that_was_missed_at_the_start_is_not_made_up_for() -> None:
    assert Evaluations(steps=30, every=0, prompts=2).due(3) is None
    assert Evaluations(steps=30, every=10, prompts=0).due(10) is None


def test_mean_is_over_what_could_be_scored_and_copies_count_once() -> None:
    evaluations = Evaluations(steps=5, every=0, prompts=3)
    assert evaluations.apply(evaluated(0, 0, 1.0, drawn=2)) is None
    assert evaluations.apply(evaluated(0, 0, 0.0)) is None
    assert evaluations.apply(evaluated(0, 1, None, drawn=1)) is None
    assert evaluations.apply(Receipt("trained", "0-2", issue=2, step=0)) is None
    assert evaluations.apply(Receipt("dropped", "eval-0-2", reason="dead:rollout")) == 0
    assert evaluations.mean(0) == 1.0
    assert evaluations.oldest == {0: 1}
    assert evaluations.means() == {0: 1.0}
    assert evaluations.apply(evaluated(0, 1, 0.5)) is None


def run_to(trained: int, steps: int = 2) -> Credits:
    credits = Credits(Rules(steps, 1, 0))
    for issue in range(trained):
        credits.apply(Receipt("issued", f"0-{issue}", issue=issue, seat=issue))
        credits.apply(Receipt("trained", f"0-{issue}", issue=issue, step=issue))
    return credits


def test_finished_when_the_last_update_and_the_last_evaluation_are_in() -> None:
    none, some = Evaluations(2, 0, 0), Evaluations(2, 0, 1)
    assert judge(run_to(1), none, None) == Verdict()
    assert judge(run_to(2), none, None).finished
    assert not judge(run_to(2), some, None).finished
    score(some, 2, None)
    assert judge(run_to(2), some, None).finished


def test_a_policy_that_starts_too_weak_is_refused() -> None:
    evaluations = Evaluations(2, 0, 2)
    assert judge(run_to(0), evaluations, 0.1) == Verdict(may_train=False)
    assert judge(run_to(0), evaluations, None).may_train
    score(evaluations, 0, 0.05)
    assert judge(run_to(1), evaluations, 0.1).may_train, "it has begun already"
    score(evaluations, 0, 0.05, 0.05)
    verdict = judge(run_to(0), evaluations, 0.1)
    assert "reward of 0.05" in verdict.failed
    assert "eval.min_reward" in verdict.failed
    assert not verdict.may_train
    unscored = Evaluations(2, 0, 1)
    score(unscored, 0, None)
    assert "not one" in judge(run_to(0), unscored, 0.1).failed
    fine = Evaluations(2, 0, 1)
    score(fine, 0, 0.1)
    assert judge(run_to(0), fine, 0.1) == Verdict()


def test_a_batch_that_never_fills_ends_the_run() -> None:
    credits, issue = Credits(Rules(2, 1, 0)), 0
    while not (verdict := judge(credits, Evaluations(2, 0, 0), None)).failed:
        credits.apply(Receipt("issued", f"0-{issue}", issue=issue, seat=0))
        credits.apply(Receipt("dropped", f"0-{issue}", issue=issue, reason="zero_variance"))
        issue += 1
    assert issue == HOPELESS_ROUNDS
    assert f"{issue} groups in a row" in verdict.failed
    assert f"zero_variance {issue}" in verdict.failed


def trained(step: int, reward: float | None, drawn: list[int]) -> Receipt:
    return Receipt("trained", "g", step=step, reward=reward, sample_steps=ints(drawn))


def test_numbers_of_an_update() -> None:
    stats = Stats()
    for receipt in (trained(3, 1.0, [3, 2]), Receipt("dropped", "x", reward=0.0), trained(3, 0.5, [1, -1])):
        stats.apply(receipt)
    values = stats.close(3)
    assert values == {"reward": 0.75, "reward_scored": 0.5, "staleness_mean": 1.0, "staleness_max": 2}
    assert stats.newest == (4, 0.75)
    assert stats.close(4) == {}


def test_a_rollback_forgets_updates_that_no_longer_exist() -> None:
    stats = Stats()
    for receipt in (trained(3, 1.0, [3]), trained(4, 1.0, [3]), Receipt("rollback", step=4), trained(4, 0.0, [4])):
        stats.apply(receipt)
    assert stats.close(4) == {"reward": 0.0, "reward_scored": 0.0, "staleness_mean": 0, "staleness_max": 0}
    assert stats.close(3)["reward"] == 1.0
