"""Credits, checkpoints, acks, rollbacks, second deliveries, zombies: no deadlock, the bound, conservation, exactly once.

What the final weights were really made of is known in the model, so that the ledger is held against the truth.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from services.controller.credits import Rules
from tests.chaos.protocol import Protocol
from tests.controller.test_credits import SHAPES


def check_over(world: Protocol) -> None:
    ledger, trainer = world.credits.ledger, world.trainer
    assert ledger.balanced
    assert ledger.pending == 0
    trained = [copy for batch in trainer.weights for copy in batch]
    assert [len(batch) for batch in trainer.weights] == [world.rules.groups_per_step] * world.rules.steps
    ids = Counter(copy.ticket.group_id for copy in trained)
    assert max(ids.values()) == 1, "a group is in the weights twice"
    assert {step: sorted(found) for step, found in ledger.by_step.items()} == {
        step: sorted(copy.ticket.group_id for copy in batch) for step, batch in enumerate(trainer.weights)
    }, "the ledger tells of other weights"
    assert all(world.trajectories[copy.ticket.group_id] == copy for copy in trained), "not what the log holds"
    assert max(trainer.ages, default=0) <= world.rules.max_staleness
    assert world.saved[-1].weights == tuple(trainer.weights), "the last weights are not durable"
    left = {copy.ticket.group_id for copy in world.work["advantages"].messages.values()}
    assert all(ledger.fate(group_id) in ("trained", "dropped") for group_id in left), (
        "somebody still waits to be trained"
    )


class Run(RuleBasedStateMachine):
    """Hypothesis chooses what happens; then everybody acts fairly, and the run must come to its end."""

    @initialize(shape=st.sampled_from(SHAPES), steps=st.integers(1, 4), every=st.integers(1, 3))
    def begin(self, shape: tuple[int, int, int], steps: int, every: int) -> None:
        self.world = Protocol(Rules(steps, *shape), every)

    @rule(times=st.integers(1, 8))
    def controller(self, times: int) -> None:
        for _ in range(times):
            self.world.controller_acts()

    @rule(number=st.integers(0, 1), which=st.integers(0, 5), times=st.integers(1, 4))
    def rollout(self, number: int, which: int, times: int) -> None:
        self.world.take_weights(number)
        for _ in range(times):
            self.world.pull(number, which)
            self.world.start_sampling(number, which)

    @rule(number=st.integers(0, 1), which=st.integers(0, 5), acknowledge=st.booleans())
    def store(self, number: int, which: int, acknowledge: bool) -> None:
        self.world.finish_sampling(number, which)
        if acknowledge:
            self.world.acknowledge_prompt(number, which)

    @rule(stage=st.integers(0, 1), which=st.integers(0, 5), acknowledge=st.booleans())
    def reward(self, stage: int, which: int, acknowledge: bool) -> None:
        self.world.pull_stage(stage, which)
        self.world.store_stage(stage, which)
        if acknowledge:
            self.world.acknowledge_stage(stage, which)

    @rule(times=st.integers(1, 12))
    def train(self, times: int) -> None:
        for _ in range(times):
            self.world.train()

    @rule(which=st.integers(0, 1), times=st.integers(1, 12))
    def zombie(self, which: int, times: int) -> None:
        for _ in range(times):
            self.world.zombie_acts(which)

    @rule(number=st.integers(0, 1))
    def rollout_dies(self, number: int) -> None:
        self.world.kill_rollout(number)

    @rule()
    def controller_dies(self) -> None:
        self.world.start_controller()

    @rule()
    def reward_dies(self) -> None:
        self.world.kill_reward()

    @rule()
    def trainer_dies(self) -> None:
        self.world.kill_trainer()

    @rule()
    def trainer_stops(self) -> None:
        self.world.stop_trainer()

    @rule()
    def checkpoint_is_damaged(self) -> None:
        self.world.damage()

    @rule()
    def ids_are_forgotten(self) -> None:
        self.world.forget_ids()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            assert self.world.finish(), "deadlock"
            check_over(self.world)


Run.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestRun = Run.TestCase

FAULTS = ("start_controller", "kill_rollout", "kill_reward", "kill_trainer", "stop_trainer", "damage", "forget_ids")


def wander(world: Protocol, rng: random.Random, rounds: int) -> None:
    """A long disorderly stretch. Work is likelier than faults, so that it gets somewhere between them."""
    work = [act for act in world.everybody() for _ in range(3)]
    for _ in range(rounds):
        if rng.random() < 0.02:
            fault = getattr(world, rng.choice(FAULTS))
            fault(*([rng.randrange(2)] if fault.__name__ == "kill_rollout" else []))
        elif rng.random() < 0.1:
            world.zombie_acts(rng.randrange(2))
        else:
            rng.choice(work)()


@pytest.mark.parametrize("shape", SHAPES)
def test_long_runs_with_many_faults_come_to_their_end(shape: tuple[int, int, int]) -> None:
    for seed in range(6):
        world, rng = Protocol(Rules(10, *shape), every=1 + seed % 3), random.Random(f"{shape}/{seed}")
        wander(world, rng, 3000)
        assert world.finish(), "deadlock"
        check_over(world)


def test_the_last_checkpoint_must_come_before_the_last_receipts() -> None:
    """The controller ends the run on these, and whoever is killed then is not started again."""

    def not_durable(last_first: bool) -> int:
        count = 0
        for seed in range(30):
            world, rng = Protocol(Rules(2, 2, 1), last_first=last_first), random.Random(seed)
            steps = world.everybody()
            while not world.credits.done:
                rng.choice(steps)()
            count += len(world.saved[-1].weights) < world.rules.steps
        return count

    assert not_durable(last_first=False) > 0
    assert not_durable(last_first=True) == 0
