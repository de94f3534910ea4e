"""Credits: the formulas, and a model of the whole run in which drops, finishing orders, rollbacks and deaths are arbitrary."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from services.controller.credits import HOPELESS_ROUNDS, MAX_ATTEMPTS, Credits, Rules, Ticket, split_id
from shared.records import Receipt
from shared.waivers import Waivers
from tests.controller.world import World

SHAPES = [
    (groups, staleness, window)
    for groups in (1, 2, 3)
    for staleness in (0, 1, 2)
    for window in range(1, staleness * groups + 2)
]


def check_over(world: World) -> None:
    """What must be true at the end of every run."""
    ledger = world.credits.ledger
    assert ledger.balanced
    assert ledger.pending == 0
    assert ledger.trained == world.rules.total
    assert {step: len(ids) for step, ids in ledger.by_step.items()} == dict.fromkeys(
        range(world.rules.steps), world.rules.groups_per_step
    )
    assert max(world.ages) <= world.rules.max_staleness
    if not world.rollbacks:
        assert "stale" not in ledger.dropped, "the rule alone keeps the bound; the last check is for rollbacks"
    prompts = Counter(split_id(group_id)[0] for group_id, entry in ledger.entries.items() if entry.fate == "trained")
    assert max(prompts.values()) == 1, "a prompt was trained twice in an epoch"


class Run(RuleBasedStateMachine):
    """Hypothesis chooses who acts; at the end everybody acts fairly, and the run must come to its end."""

    @initialize(shape=st.sampled_from(SHAPES), steps=st.integers(1, 4))
    def begin(self, shape: tuple[int, int, int], steps: int) -> None:
        self.world = World(Rules(steps, *shape))

    @rule(times=st.integers(1, 8))
    def controller(self, times: int) -> None:
        for _ in range(times):
            self.world.controller_acts()

    @rule()
    def controller_dies(self) -> None:
        self.world.start_controller()

    @rule(number=st.integers(0, 1), pulls=st.integers(0, 4), weights=st.booleans())
    def rollout(self, number: int, pulls: int, weights: bool) -> None:
        if weights:
            self.world.take_weights(number)
        for _ in range(pulls):
            self.world.pull(number)

    @rule(number=st.integers(0, 1), which=st.integers(0, 5))
    def start_sampling(self, number: int, which: int) -> None:
        self.world.start_sampling(number, which)

    @rule(number=st.integers(0, 1), which=st.integers(0, 5))
    def finish_sampling(self, number: int, which: int) -> None:
        self.world.finish_sampling(number, which)

    @rule(number=st.integers(0, 1))
    def rollout_dies(self, number: int) -> None:
        self.world.kill_rollout(number)

    @rule(which=st.integers(0, 5), drop=st.booleans())
    def score(self, which: int, drop: bool) -> None:
        self.world.score(which, drop)

    @rule(which=st.integers(0, 5), times=st.integers(1, 3))
    def train(self, which: int, times: int) -> None:
        for _ in range(times):
            self.world.receive(which)
            self.world.train()

    @rule()
    def checkpoint(self) -> None:
        self.world.checkpoint()

    @rule()
    def trainer_dies(self) -> None:
        self.world.kill_trainer()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            assert self.world.finish(), "deadlock"
            check_over(self.world)


Run.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRun = Run.TestCase


def wander(world: World, rng: random.Random, rounds: int, drop: float, trainer_deaths: bool) -> None:
    """A long disorderly stretch of a run."""
    acts = ["controller_acts", "pull", "take_weights", "start_sampling", "finish_sampling", "score", "receive", "train"]
    acts += ["checkpoint", "start_controller", "kill_rollout", "kill_trainer"]
    weights = [20, 10, 5, 10, 10, 10, 10, 20, 1, 1, 1, 0.3 * trainer_deaths]
    for act in rng.choices(acts, weights, k=rounds):
        number, which = rng.randrange(2), rng.randrange(6)
        arguments = {
            **dict.fromkeys(("pull", "take_weights", "kill_rollout"), (number,)),
            **dict.fromkeys(("start_sampling", "finish_sampling"), (number, which)),
            "score": (which, rng.random() < drop),
            "receive": (which,),
        }
        getattr(world, act)(*arguments.get(act, ()))


@pytest.mark.parametrize("trainer_deaths", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_long_runs_with_many_faults_come_to_their_end(shape: tuple[int, int, int], trainer_deaths: bool) -> None:
    for drop in (0.1, 0.9):
        rng = random.Random(f"{shape}/{drop}")
        world = World(Rules(12, *shape))
        wander(world, rng, 1500, drop, trainer_deaths)
        assert world.finish(), "deadlock"
        check_over(world)


def test_without_faults_nothing_is_ever_stale_or_late() -> None:
    for shape in SHAPES:
        world = World(Rules(5, *shape))
        assert world.finish()
        check_over(world)
        assert not world.credits.ledger.dropped
        assert len(world.credits.ledger.entries) == world.rules.total


class TooManySlots(Rules):
    """(S + 1) P, as one might think at first."""

    @property
    def slots(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_step


def drop_the_first(world: World, count: int) -> World:
    """The first groups are filtered out; whatever may start under the first weights has started."""
    while world.controller_acts() or world.pull(0) or world.start_sampling(0) or world.finish_sampling(0):
        pass
    for _ in range(count):
        world.score(0, drop=True)
    return world


def test_the_window_costs_slots() -> None:
    """With P = 2, S = 1, W = 2: three of four groups are dropped, and the fourth would need a step that needs it."""
    assert not drop_the_first(World(TooManySlots(3, 2, 1, 2)), 3).finish()
    assert drop_the_first(World(Rules(3, 2, 1, 2)), 3).finish()


def deep_rollback(waive: bool) -> World:
    """Eight updates without a checkpoint; then the trainer dies while prompts lie in the queue."""
    world = World(Rules(12, 2, 1, 1), waive=waive)
    while world.step < 8:
        for act in world.everybody():
            act()
    world.finish_sampling(0)
    for _ in range(50):
        world.controller_acts()
    world.kill_trainer()
    return world


def test_a_deep_rollback_locks_up_without_waivers_and_not_with_them() -> None:
    assert not deep_rollback(waive=False).finish()
    world = deep_rollback(waive=True)
    assert world.finish()
    check_over(world)
    assert world.credits.ledger.dropped["stale"] > 0


def test_waivers_missing_in_kv_cover_everything_issued_until_the_restart() -> None:
    credits = Credits(Rules(5, 2, 1))
    credits.apply(Receipt("rollback", step=3))
    for ticket in credits.plan():
        credits.apply(issued(ticket))
    credits.apply(Receipt("rollback", step=1))
    assert credits.waivers == Waivers([0, 4], [3, 1])
    credits.waivers.issues[1] = 2
    credits.restored(Waivers([1], [3]))
    assert credits.waivers == Waivers([1, 4], [3, 1])


def issued(ticket: Ticket) -> Receipt:
    return Receipt("issued", ticket.group_id, ticket.issue, ticket.seat, ticket.min_step)


def drop(credits: Credits, group_id: str, reason: str = "zero_variance") -> None:
    credits.apply(Receipt("dropped", group_id, credits.ledger.entries[group_id].issue, reason=reason))


def open_all(credits: Credits) -> list[Ticket]:
    plan = credits.plan()
    for ticket in plan:
        assert credits.apply(issued(ticket))
    return plan


def test_ids_follow_the_data_order_over_epochs() -> None:
    credits = Credits(Rules(4, 3, 1), epoch_size=4)
    assert [ticket.group_id for ticket in open_all(credits)] == ["0-0", "0-1", "0-2", "0-3", "1-0", "1-1"]
    assert credits.position_of("1-1.2") == 5
    assert [t.min_step for t in Credits(Rules(4, 2, 0, 1)).plan()] == [0, 0]


def test_a_stale_prompt_is_issued_again_and_not_for_ever() -> None:
    credits = Credits(Rules(100, 1, 0), epoch_size=10)
    ids = []
    for _ in range(MAX_ATTEMPTS + 2):
        (ticket,) = open_all(credits)
        ids.append(ticket.group_id)
        drop(credits, ticket.group_id, "stale")
    assert ids == ["0-0", "0-0.1", "0-0.2", "0-0.3", "0-1"]
    assert credits.plan()[0].group_id == "0-1.1"
    assert credits.plan()[0].position == 1


def test_filtered_groups_give_their_credit_back_but_their_prompt_is_done() -> None:
    credits = Credits(Rules(2, 2, 0))
    open_all(credits)
    assert credits.plan() == []
    drop(credits, "0-0")
    (ticket,) = credits.plan()
    assert ticket == Ticket("0-2", 2, issue=2, seat=1, min_step=0)


def test_receipts_of_evaluation_groups_change_nothing() -> None:
    credits = Credits(Rules(2, 2, 0))
    assert not credits.apply(Receipt("dropped", "eval-0-1", reason="dead:reward"))
    assert credits.ledger.balanced


def test_hopeless_only_if_nothing_at_all_survives() -> None:
    credits = Credits(Rules(100, 2, 0), epoch_size=1000)
    survivor = open_all(credits)[1].group_id
    drop(credits, "0-0")
    for _ in range(HOPELESS_ROUNDS * 2 - 1):
        assert credits.hopeless() == 0
        (ticket,) = open_all(credits)
        drop(credits, ticket.group_id)
    assert credits.drops_since_trained == HOPELESS_ROUNDS * 2
    assert credits.hopeless() == 0, f"{survivor} still waits for its batch"
    (ticket,) = open_all(credits)
    drop(credits, ticket.group_id)
    assert credits.hopeless() == HOPELESS_ROUNDS * 2
