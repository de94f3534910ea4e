"""Faults of admission that others had: capacities that vanish, credits that are not given back, a bias to short answers."""

from __future__ import annotations

from collections import Counter

import pytest

from services.controller.credits import Credits, Rules
from services.controller.groups import issued_receipt
from shared.records import Receipt
from tests.controller.test_credits import SHAPES
from tests.controller.world import World

REASONS = (
    "zero_variance",
    "truncated",
    "unscorable",
    "prompt_too_long",
    "stale",
    "rollback",
    "dead:rollout",
    "dead:reward",
    "dead:advantages",
    "dead:teacher",
    "dead:trainer",
    "a reason that is yet to be thought of",
)


@pytest.mark.parametrize("shape", SHAPES)
def test_capacity_is_a_full_batch_at_least_and_does_not_depend_on_replicas(shape: tuple[int, int, int]) -> None:
    """A limit that was divided by the number of workers, twice, came to nothing, and the run hung without a word."""
    rules = Rules(5, *shape)
    assert rules.slots >= rules.groups_per_step >= 1
    for replicas in (1, 2, 7):
        world = World(Rules(2, *shape), replicas=replicas)
        assert world.finish()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("reason", REASONS)
def test_every_way_out_gives_the_credit_back(reason: str, deterministic: bool) -> None:
    """Groups that a filter dropped were not given back to the capacity: after some steps nothing was issued any more."""
    credits = Credits(Rules(100, 2, 1, deterministic=deterministic), epoch_size=1000)
    for _ in range(50):
        plan = credits.plan()
        assert plan, f"{reason} keeps the credit"
        for ticket in plan:
            credits.apply(issued_receipt(ticket))
        for entry in credits.ledger.pending_entries():
            credits.apply(Receipt("dropped", entry.group_id, entry.issue, reason=reason))
        assert credits.in_flight == 0


def test_after_a_resume_no_more_is_admitted_than_before() -> None:
    """A counter of accepted groups began at 0 while the version was high, so the formula admitted without end."""
    rules = Rules(50, 4, 1)
    before, log = Credits(rules), list[Receipt]()
    for step in range(20):
        for ticket in before.plan():
            log.append(issued_receipt(ticket))
            before.apply(log[-1])
        for entry in before.ledger.pending_entries()[:4]:
            log.append(Receipt("trained", entry.group_id, entry.issue, step=step))
            before.apply(log[-1])
    resumed = Credits(rules)
    for receipt in log:
        resumed.apply(receipt)
    assert resumed.plan() == before.plan()
    assert resumed.in_flight + len(resumed.plan()) == rules.slots


def test_slow_groups_are_trained_like_all_others() -> None:
    """Discarding what takes long and asking again left a model trained on short and easy prompts only."""
    for window in (1, 3):
        world, turns = World(Rules(20, 4, 1, window), replicas=1), Counter[int]()
        others = [world.controller_acts, world.score, world.receive, world.train]
        while not world.over:
            moved = sum(act() for act in others)
            moved += sum(act(0) for act in (world.take_weights, world.pull, world.start_sampling))
            for number, one in reversed(list(enumerate(world.rollouts[0].running))):
                turns[one.ticket.issue] += 1
                if turns[one.ticket.issue] >= (
                    10 if one.ticket.issue % 5 == 0 else 1
                ):  # every fifth takes ten times as long
                    world.finish_sampling(0, number)
                moved += 1
            assert moved, "deadlock"
        entries = world.credits.ledger.entries.values()
        assert {entry.issue for entry in entries if entry.fate == "trained"} == set(range(world.rules.total))
        assert not world.credits.ledger.dropped, "the slow ones were trained too, and each was asked once"
