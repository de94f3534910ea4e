"""Deterministic runs: who is drawn under which weights, and what each update holds, whatever happens in which order.

The model is that of test_credits, with the three rules of shared/rounds.py put in: exact weights, a trainer that waits for the
round, rounds in the controller. Which groups a filter drops is a function of the group; everything else is chance, deaths of
all services included. Every such run must give the very same assignment as an undisturbed one.
"""

from __future__ import annotations

import random
import zlib

import pytest

from services.controller.credits import Rules
from tests.controller.test_credits import check_over
from tests.controller.world import Checkpoint, Sampled, World

SHAPES = [(groups, staleness) for groups in (1, 2, 3) for staleness in (0, 1, 2)]


class Rounds(World):
    """A world in which the rules hold. `drops` in 1000 groups are dropped by a filter, as their id and weights will have it."""

    def __init__(self, rules: Rules, drops: int = 0) -> None:
        self.drops = drops
        self.drawn: dict[str, tuple[int, int]] = {}
        self.updates: dict[int, list[str]] = {}
        super().__init__(rules, waive=False)

    def start_trainer(self, checkpoint: Checkpoint) -> None:
        super().start_trainer(checkpoint)
        self.rollbacks = []  # a lost history is the present one
        self.next_issue = checkpoint.next_issue

    def kill_trainer(self) -> None:
        super().kill_trainer()
        self.rollbacks = []

    def rollback_detail(self) -> dict[str, object]:
        return super().rollback_detail() | {"repeats": True}

    def take_weights(self, number: int) -> bool:
        """A switch interrupts what runs: it is drawn again."""
        changed = super().take_weights(number)
        rollout = self.rollouts[number]
        if changed:
            rollout.waiting, rollout.running = rollout.running + rollout.waiting, []
        return changed

    def may_start(self, number: int, one: Sampled) -> bool:
        return self.versions[self.rollouts[number].version] == one.ticket.min_step

    def start_sampling(self, number: int, which: int = 0) -> bool:
        """Second deliveries first: what the weights have gone past was drawn before."""
        rollout = self.rollouts[number]
        late = [one for one in rollout.waiting if self.versions[rollout.version] > one.ticket.min_step]
        for one in late:
            assert one.ticket.group_id in self.drawn, "nobody will ever draw it"
            rollout.waiting.remove(one)
        return super().start_sampling(number, which) or bool(late)

    def finish_sampling(self, number: int, which: int = 0) -> bool:
        running = self.rollouts[number].running
        if running:
            one = running[which % len(running)]
            drawn = self.versions[one.version], one.ticket.issue
            assert self.drawn.setdefault(one.ticket.group_id, drawn) == drawn
        return super().finish_sampling(number, which)

    def score(self, which: int = 0, drop: bool = False) -> bool:
        if not self.scoring:
            return False
        one = self.scoring[which % len(self.scoring)]
        content = f"{one.ticket.group_id}/{self.versions[one.version]}".encode()
        return super().score(which, zlib.crc32(content) % 1000 < self.drops)

    def may_update(self) -> bool:
        return self.window.settled_below(self.rules.round_end(self.step, self.next_issue))

    def _update(self) -> None:
        ids = [group.ticket.group_id for group in self.batch]
        assert self.updates.setdefault(self.step, ids) == ids
        self.next_issue = self.batch[-1].ticket.issue + 1
        super()._update()


def disturbed(rules: Rules, drops: int, seed: int) -> Rounds:
    world, rng = Rounds(rules, drops), random.Random(seed)
    acts = ["controller_acts", "pull", "take_weights", "start_sampling", "finish_sampling", "score", "receive", "train"]
    acts += ["checkpoint", "start_controller", "kill_rollout", "kill_trainer", "pull_again"]
    weights = [20, 10, 5, 10, 10, 10, 10, 20, 1, 1, 1, 0.5, 1]
    for act in rng.choices(acts, weights, k=2000):
        number, which = rng.randrange(2), rng.randrange(6)
        arguments = {
            **dict.fromkeys(("pull", "take_weights", "kill_rollout"), (number,)),
            **dict.fromkeys(("start_sampling", "finish_sampling"), (number, which)),
            **dict.fromkeys(("score", "receive", "pull_again"), (which,)),
        }
        getattr(world, act)(*arguments.get(act, ()))
    return world


@pytest.mark.parametrize("drops", [0, 200, 700])
@pytest.mark.parametrize("shape", SHAPES)
def test_whatever_happens_gives_the_same_run(shape: tuple[int, int], drops: int) -> None:
    rules = Rules(8, *shape, deterministic=True)
    quiet = Rounds(rules, drops)
    assert quiet.finish(), "deadlock"
    check_over(quiet)
    for seed in range(12):
        world = disturbed(rules, drops, seed)
        assert world.finish(), "deadlock"
        check_over(world)
        assert world.updates == quiet.updates
        assert world.drawn == quiet.drawn
        assert "stale" not in world.credits.ledger.dropped


def test_without_drops_a_round_is_what_the_credits_would_issue() -> None:
    for shape in SHAPES:
        plain, rounds = World(Rules(5, *shape)), Rounds(Rules(5, *shape, deterministic=True))
        assert plain.finish()
        assert rounds.finish()
        tickets = [
            {(entry.group_id, entry.issue, entry.min_step) for entry in world.credits.ledger.entries.values()}
            for world in (plain, rounds)
        ]
        assert tickets[0] == tickets[1]
        assert max(rounds.ages) == shape[1] or rounds.rules.steps <= shape[1]


def test_credits_that_count_known_drops_make_it_a_matter_of_chance() -> None:
    """What the rounds are for: the plain rule gives other weights to the same group, by when a drop became known."""

    class Plain(Rounds):
        def may_start(self, number: int, one: Sampled) -> bool:
            return self.versions[self.rollouts[number].version] >= one.ticket.min_step

        def may_update(self) -> bool:
            return True

    rules = Rules(8, 2, 1)
    with pytest.raises(AssertionError):
        for seed in range(20):
            world = disturbed(rules, 200, seed)
            plain = Plain(rules, 200)
            assert plain.finish()
            assert world.finish()
            assert world.drawn == plain.drawn
