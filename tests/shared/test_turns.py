"""The table of turns: trainer and engines never meet on the device, and nobody waits for the dead, whoever is killed when."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.turns import NotYours, Replaced, Turns

TTL_S = 15.0


def given(version: int = 1) -> Turns:
    turns = Turns()
    turns.ask("t", "here")
    turns.give("t", version)
    return turns


def test_the_device_is_the_trainers_until_it_is_given() -> None:
    turns = Turns()
    assert not turns.enter("r", "e", 0.0)
    turns.ask("t", "here")
    assert turns.alone("t")
    turns.give("t", 7)
    assert turns.enter("r", "e", 0.0)
    assert (turns.version, turns.number, turns.host, turns.awake()) == (7, 1, "here", ["r"])


def test_asking_goes_before_waking_and_waits_for_sleep() -> None:
    turns = given()
    assert turns.enter("r", "e", 0.0)
    turns.ask("t", "here")
    turns.ask("t", "here")
    assert turns.number == 2
    assert not turns.enter("s", "f", 0.0)
    assert not turns.alone("t")
    with pytest.raises(NotYours, match="r did not sleep yet"):
        turns.give("t", 2)
    turns.sleep("r", "e")
    assert turns.alone("t")


def test_a_replaced_trainer_is_refused() -> None:
    turns = given()
    turns.ask("u", "here")
    for late in (lambda: turns.alone("t"), lambda: turns.give("t", 9)):
        with pytest.raises(Replaced):
            late()
    turns.give("u", 2)
    assert turns.version == 2


def test_an_earlier_engine_of_a_replica_changes_nothing() -> None:
    turns = given()
    turns.enter("r", "new", 0.0)
    turns.sleep("r", "old")
    turns.took("r", "old", 5)
    turns.leave("r", "old")
    assert turns.awake() == ["r"]
    turns.leave("r")
    assert turns.awake() == []


def test_what_all_have_taken() -> None:
    turns = given(3)
    turns.enter("r", "e", 0.0)
    turns.enter("s", "f", 0.0)
    turns.took("r", "e", 3)
    assert not turns.taken(3)
    turns.took("s", "f", 4)
    assert turns.taken(3)
    turns.ask("t", "here")
    assert not turns.taken(3)


def test_who_is_missing() -> None:
    turns = given()
    turns.enter("old", "e", 0.0)
    turns.enter("new", "f", 100.0)
    assert turns.missing(["old", "new"], 101.0, TTL_S) == []
    assert turns.missing([], 101.0, TTL_S) == ["old"]
    turns.put_out(["old", "nobody"])
    assert turns.awake() == ["new"]
    assert Turns.load(turns.dump()) == turns


@dataclass
class Process:
    """A trainer or a rollout, as far as the device is concerned."""

    incarnation: str
    on_device: bool = False
    """What is really so, whatever the table says."""


@dataclass
class World:
    turns: Turns = field(default_factory=Turns)
    trainer: Process | None = None
    rollouts: dict[str, Process] = field(default_factory=dict)
    born: int = 0

    def name(self, what: str) -> str:
        self.born += 1
        return f"{what}{self.born}"


REPLICAS = st.sampled_from(["r0", "r1", "r2"])


class Handshake(RuleBasedStateMachine):
    """Trainer and rollouts as they use the table (services/trainer/turn.py, services/rollout/seat.py), killed between any two of
    their steps. A replica's engine dies with it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    # -- the trainer

    @rule()
    def trainer_starts(self) -> None:
        if self.world.trainer is None:
            self.world.trainer = Process(self.world.name("t"))

    @rule()
    def trainer_is_killed(self) -> None:
        self.world.trainer = None

    @precondition(lambda self: self.world.trainer is not None)
    @rule()
    def trainer_asks(self) -> None:
        assert self.world.trainer is not None
        self.world.turns.ask(self.world.trainer.incarnation, "here")

    @precondition(lambda self: self.world.trainer is not None)
    @rule()
    def trainer_looks(self) -> None:
        trainer, turns = self.world.trainer, self.world.turns
        assert trainer is not None
        if turns.trainer == trainer.incarnation and turns.alone(trainer.incarnation):
            trainer.on_device = True

    @precondition(lambda self: self.world.trainer is not None and self.world.trainer.on_device)
    @rule()
    def trainer_sleeps_and_gives(self) -> None:
        trainer = self.world.trainer
        assert trainer is not None
        trainer.on_device = False
        self.world.turns.give(trainer.incarnation, self.world.turns.version + 1)

    @precondition(lambda self: self.world.trainer is not None)
    @rule()
    def trainer_sees_who_is_missing(self) -> None:
        turns = self.world.turns
        turns.put_out(turns.missing(self.world.rollouts, 100.0, TTL_S))

    # -- the rollouts

    @rule(replica=REPLICAS)
    def rollout_starts(self, replica: str) -> None:
        if replica not in self.world.rollouts:
            self.world.turns.leave(replica)
            self.world.rollouts[replica] = Process(self.world.name("e"))

    @rule(replica=REPLICAS)
    def rollout_is_killed(self, replica: str) -> None:
        self.world.rollouts.pop(replica, None)

    @rule(replica=REPLICAS)
    def rollout_enters(self, replica: str) -> None:
        engine = self.world.rollouts.get(replica)
        if engine is not None and self.world.turns.enter(replica, engine.incarnation, 0.0):
            engine.on_device = True

    @rule(replica=REPLICAS)
    def rollout_sleeps(self, replica: str) -> None:
        engine = self.world.rollouts.get(replica)
        if engine is not None and self.world.turns.holder == "trainer":
            engine.on_device = False

    @rule(replica=REPLICAS)
    def rollout_tells_that_it_sleeps(self, replica: str) -> None:
        engine = self.world.rollouts.get(replica)
        if engine is not None and not engine.on_device:
            self.world.turns.sleep(replica, engine.incarnation)

    @rule(replica=REPLICAS)
    def engine_dies_and_leaves(self, replica: str) -> None:
        engine = self.world.rollouts.get(replica)
        if engine is not None:
            self.world.turns.leave(replica, engine.incarnation)
            self.world.rollouts[replica] = Process(self.world.name("e"))

    # -- what holds

    @invariant()
    def they_never_meet(self) -> None:
        trainer = self.world.trainer
        on_device = [replica for replica, engine in self.world.rollouts.items() if engine.on_device]
        assert not (trainer is not None and trainer.on_device and on_device)

    @invariant()
    def nobody_waits_for_ever(self) -> None:
        """From wherever they are: a trainer that starts gets the device, gives it, and then every engine wakes."""
        turns = Turns.load(self.world.turns.dump())
        turns.put_out(turns.missing(self.world.rollouts, 100.0, TTL_S))
        for replica, engine in self.world.rollouts.items():
            turns.sleep(replica, engine.incarnation)
        turns.ask("successor", "here")
        assert turns.alone("successor")
        turns.give("successor", turns.version + 1)
        for replica, engine in self.world.rollouts.items():
            assert turns.enter(replica, engine.incarnation, 0.0)
            turns.took(replica, engine.incarnation, turns.version)
        assert turns.taken(turns.version)


Handshake.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_the_handshake = Handshake.TestCase
