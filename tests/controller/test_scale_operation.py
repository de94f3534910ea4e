"""The state machine of scale operations: its table, and its properties in worlds that hypothesis makes up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.controller.scaling import operation
from services.controller.scaling.operation import REMOVE_S, STATES, TERMINAL, Operation, Seen, advance, cancel, merge
from shared.records import Heartbeat
from shared.wanted import Wanted

TIMEOUT_S = 60.0
SPEC = {"service": "rollout", "by": "", "engine_url": ""}


def beat(name: str, state: str = "idle", version: int = 5, at: float = 0.0, started: float = 0.0) -> Heartbeat:
    return Heartbeat(name.split("-")[0], name, state, 0, version, 0, {}, "host", 1, started, at)


def op(kind: str = "out", number: int = 1, **fields: object) -> Operation:
    return Operation(f"id{number}", kind, "rollout", "{}", number, 0.0, TIMEOUT_S, **fields)  # type: ignore[arg-type]


class World:
    """A run with `count` rollouts, a launcher that does what is wanted, and time that the test moves."""

    def __init__(self, count: int = 2, version: int = 5) -> None:
        self.now, self.version = 0.0, version
        self.wanted = Wanted({f"rollout-{n}": dict(SPEC) for n in range(count)}, counts={"rollout": count})
        self.beats = {name: beat(name, started=float(n)) for n, name in enumerate(self.wanted.replicas)}
        self.gone: dict[str, str] = {}
        self.ops: list[Operation] = []

    @property
    def seen(self) -> Seen:
        return Seen(dict(self.beats), self.wanted, dict(self.gone), self.version)

    def add(self, kind: str = "out", **fields: object) -> int:
        self.ops.append(op(kind, len(self.ops) + 1, **fields))
        return len(self.ops) - 1

    def turn(self, seconds: float = 1.0) -> None:
        """The controller's tick."""
        self.now += seconds
        seen = self.seen
        for index, one in enumerate(self.ops):
            self.ops[index] = advance(one, seen, self.ops, self.now)
        self.wanted = merge(self.wanted, self.ops, self.gone)

    def show(self, state: str, *names: str, version: int | None = None) -> None:
        for name in names:
            known = self.version if version is None else version
            self.beats[name] = beat(name, state, known, self.now, self.now)

    def leave(self, *names: str) -> None:
        for name in names:
            self.beats.pop(name, None)

    def until(self, status: str, number: int = 0) -> Operation:
        for _ in range(300):
            if self.ops[number].status == status:
                return self.ops[number]
            self.turn()
        raise AssertionError(f"{self.ops[number].status}, not {status}")


def test_out_goes_through_its_states_and_is_as_far_as_the_least_far():
    world = World()
    world.add(target=4)
    seen = []
    for state, names in (
        ("", ()),
        ("starting", ("rollout-2", "rollout-3")),
        ("fetching weights", ("rollout-2",)),
        ("starting engine", ("rollout-3",)),
        ("fetching weights", ("rollout-3",)),
        ("idle", ("rollout-2", "rollout-3")),
        ("idle", ("rollout-2", "rollout-3")),
    ):
        world.show(state, *names)
        world.turn()
        seen.append(world.ops[0].status)
    assert seen == [
        "CREATING",
        "HEALTH_CHECKING",
        "HEALTH_CHECKING",
        "HEALTH_CHECKING",
        "WEIGHT_SYNCING",
        "READY",
        "ACTIVE",
    ]
    assert world.ops[0].staying == ["rollout-2", "rollout-3"]
    assert list(world.wanted.replicas) == ["rollout-0", "rollout-1", "rollout-2", "rollout-3"]
    assert list(world.ops[0].reached) == ["CREATING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "READY", "ACTIVE"]


def test_a_newcomer_under_older_weights_is_not_ready_and_times_out_saying_so():
    world = World(version=7)
    world.add(target=3)
    world.turn()
    world.show("sampling", "rollout-2", version=6)
    world.turn()
    assert world.ops[0].status == "WEIGHT_SYNCING"
    world.turn(TIMEOUT_S)
    assert world.ops[0].status == "REMOVING"
    world.leave("rollout-2")
    assert "holds version 6 of the weights, 7 is needed" in world.until("FAILED").message
    assert "rollout-2" not in world.wanted.replicas


def test_what_came_up_in_time_is_kept_or_all_is_taken_back():
    for keep, status, there in ((True, "PARTIAL", ["rollout-2"]), (False, "FAILED", [])):
        world = World()
        world.add(target=4, keep_partial=keep)
        world.turn()
        world.show("idle", "rollout-2")
        world.turn(TIMEOUT_S + 1)
        assert world.ops[0].status == "REMOVING"
        world.leave(*world.ops[0].removing)
        assert world.until(status).errors.keys() == {"rollout-3"}
        assert [name for name in world.wanted.replicas if name in ("rollout-2", "rollout-3")] == there
        assert world.wanted.leaving == []


def test_a_newcomer_that_cannot_run_fails_the_operation_at_once():
    world = World()
    world.add(urls=["http://a:1", "http://b:1"])
    world.turn()
    assert world.ops[0].status == "CONNECTING"
    assert [spec["engine_url"] for spec in world.ops[0].specs.values()] == ["http://a:1", "http://b:1"]
    world.gone = {"rollout-2": "exit code 2: the engine serves another model"}
    world.show("idle", "rollout-3")
    world.turn()
    assert "serves another model" in world.until("PARTIAL").message
    again = world.add(urls=["http://b:1"])
    assert "registered" in world.until("NOOP", again).message


@pytest.mark.parametrize("status", ["PENDING", "CREATING", "HEALTH_CHECKING", "WEIGHT_SYNCING", "READY"])
def test_out_is_cancelled_in_each_state(status: str):
    world = World()
    if status == "PENDING":
        world.add(target=3)  # in its way
    number = world.add(target=4)
    states = {"HEALTH_CHECKING": "starting", "WEIGHT_SYNCING": "fetching weights", "READY": "idle"}
    world.turn()
    if status in states:
        world.show(states[status], "rollout-2", "rollout-3")
        world.turn()
    assert world.ops[number].status == status
    world.ops[number] = cancel(world.ops[number], world.now)
    assert cancel(world.ops[number], world.now) == world.ops[number], "may be repeated"
    world.turn()
    if status not in ("PENDING", "CREATING"):  # who is there drains first
        assert set(world.wanted.leaving) == {"rollout-2", "rollout-3"}
    world.leave("rollout-2", "rollout-3")
    world.until("CANCELLED", number)
    assert world.wanted.leaving == []
    assert "rollout-3" not in world.wanted.replicas
    assert world.ops[number].reached["CANCELLED"] <= world.now


@pytest.mark.parametrize("status", sorted(TERMINAL - {"CANCELLED"}))
def test_what_is_over_cannot_be_cancelled(status: str):
    with pytest.raises(ValueError, match=f"{status} cannot be cancelled: it is over"):
        cancel(op(status=status), 0.0)


def test_in_drains_the_newest_first_and_initial_ones_may_leave_too():
    world = World(count=3)
    world.add("in", target=1)
    world.turn()
    assert world.ops[0].status == "DRAINING"
    assert world.wanted.leaving == ["rollout-1", "rollout-2"]
    assert list(world.wanted.replicas) == ["rollout-0"]
    world.leave("rollout-2")
    world.turn()
    assert world.ops[0].removed == ["rollout-2"]
    world.leave("rollout-1")
    world.turn()
    assert world.ops[0].status == "COMPLETED"
    assert world.wanted.leaving == []
    named = world.add("in", names=["rollout-0", "nobody"])
    world.turn()
    assert world.ops[named].removing == ["rollout-0"]


def test_a_drain_that_times_out_ends_them_and_what_stays_all_the_same_is_told():
    world = World(count=3)
    world.add("in", target=1)
    world.turn()
    world.turn(TIMEOUT_S + 1)
    assert world.ops[0].status == "REMOVING"
    assert world.wanted.killed == ["rollout-1", "rollout-2"]
    assert "did not drain within 60 s" in world.ops[0].message
    world.leave("rollout-1")
    world.turn(REMOVE_S + 1)
    assert world.ops[0].status == "PARTIAL"
    assert world.ops[0].removed == ["rollout-1"]
    assert "still there" in world.ops[0].errors["rollout-2"]
    assert world.wanted.killed == []


def test_force_ends_them_at_once_and_a_dry_look_changes_nothing():
    world = World()
    trial = advance(op("in", target=0), world.seen, (), 0.0)
    assert trial.specs.keys() == {"rollout-0", "rollout-1"}
    assert world.wanted.leaving == []
    world.add("in", target=0, force=True)
    world.turn()
    assert world.wanted.killed == ["rollout-0", "rollout-1"]
    world.leave("rollout-0", "rollout-1")
    world.turn()
    assert world.ops[0].status == "COMPLETED"


def test_in_is_cancelled_while_it_drains_and_who_left_is_wanted_again():
    world = World(count=3)
    world.add("in", target=1)
    world.turn()
    world.leave("rollout-2")
    world.turn()
    world.ops[0] = cancel(world.ops[0], world.now)
    world.turn()
    assert "rollout-2" in world.wanted.replicas
    world.until("CANCELLED")
    assert world.wanted.leaving == []
    assert set(world.wanted.replicas) == {"rollout-0", "rollout-1", "rollout-2"}


def test_in_that_ends_replicas_is_not_cancelled():
    world = World()
    world.add("in", target=1, force=True)
    world.turn()
    with pytest.raises(ValueError, match="REMOVING cannot be cancelled: it is ending replicas already"):
        cancel(world.ops[0], world.now)


def test_what_conflicts_waits_its_turn_and_the_rest_goes_on():
    world = World()
    first, second = world.add(target=3), world.add("in", target=1)
    elsewhere, other = world.add(urls=["http://a:1"]), world.add(target=2)
    world.ops[other] = replace(world.ops[other], role="reward")
    world.turn()
    assert [one.status for one in world.ops] == ["CREATING", "PENDING", "CONNECTING", "CREATING"]
    names = [name for one in world.ops for name in one.specs]
    assert len(names) == len(set(names)), "each newcomer has a name of its own"
    world.show("idle", *world.ops[first].specs)
    world.turn()
    world.show("idle", *world.ops[first].specs)
    world.turn()
    assert world.ops[first].status == "ACTIVE"
    assert world.ops[second].status == "DRAINING", "its target is looked at when it starts"
    assert len(world.ops[second].removing) == 2
    assert not set(world.ops[second].removing) & world.ops[elsewhere].specs.keys(), "engines elsewhere are not counted"


def test_a_target_that_is_reached_is_a_noop():
    world = World()
    for kind in ("out", "in"):
        number = world.add(kind, target=2)
        world.turn()
        assert world.ops[number].status == "NOOP"
    world.add(target=1)
    world.turn()
    assert world.ops[-1].status == "NOOP"


acts = st.lists(
    st.one_of(
        st.tuples(st.just("out"), st.integers(0, 5)),
        st.tuples(st.just("in"), st.integers(0, 5)),
        st.tuples(st.just("elsewhere"), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
        st.tuples(st.just("launch"), st.integers(0, 20)),
        st.tuples(st.just("drain"), st.integers(0, 20)),
        st.tuples(st.just("die"), st.integers(0, 20)),
        st.tuples(st.just("give up"), st.integers(0, 20)),
        st.tuples(st.just("turn"), st.integers(0, 40)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=40,
)


class Loose(World):
    """Everybody may do anything at any time; a controller that is killed forgets nothing that is on record."""

    def act(self, what: str, number: int) -> None:
        wanted, alive = list(self.wanted.replicas), list(self.beats)
        if what in ("out", "in"):
            self.add(what, target=number)
        elif what == "elsewhere":
            self.add(urls=[f"http://engine-{number}:1"])
        elif what == "cancel" and self.ops:
            one = self.ops[number % len(self.ops)]
            if not one.over and one.status != "REMOVING":
                self.ops[one.number - 1] = cancel(one, self.now)
        elif what == "launch" and wanted:
            name = wanted[number % len(wanted)]
            if name not in self.gone:
                before = self.beats.get(name)
                later = {None: "starting", "starting": "fetching weights"}.get(before and before.state, "idle")
                self.show(later, name)
        elif what == "drain" and self.wanted.leaving:
            self.leave(self.wanted.leaving[number % len(self.wanted.leaving)])
        elif what == "die" and alive:
            self.leave(alive[number % len(alive)])
        elif what == "give up":
            mine = [name for name, spec in self.wanted.replicas.items() if spec["by"] and name not in self.beats]
            if mine:
                self.gone[mine[number % len(mine)]] = "cannot run"
        elif what == "turn":
            self.turn(float(number))
        elif what == "restart":  # only the record of what is wanted is behind: it was to be written next
            seen = self.seen
            for index, one in enumerate(self.ops):
                self.ops[index] = advance(one, seen, self.ops, self.now)
        self.gone = {name: why for name, why in self.gone.items() if name in self.wanted.replicas}
        self.check()

    def check(self) -> None:
        active = [one for one in self.ops if not one.over and one.status != "PENDING"]
        for index, one in enumerate(active):
            assert not any(operation.conflict(one, other) for other in active[:index])
        assert {one.status for one in self.ops} <= STATES

    def settle(self) -> None:
        """Everybody does what is asked of them from here on."""
        for _ in range(40 * (len(self.ops) + 1)):
            self.turn()
            for name in (*self.wanted.leaving, *self.wanted.killed):
                self.leave(name)
            for name in self.wanted.replicas:
                if name not in self.gone:
                    self.show("idle", name)
            for name in set(self.beats) - self.wanted.replicas.keys():
                self.leave(name)


@given(acts)
def test_every_operation_ends_and_leaves_nothing_behind(plan: list[tuple[str, int]]):
    world = Loose()
    for what, number in plan:
        world.act(what, number)
    world.settle()
    assert all(one.over for one in world.ops), [one.status for one in world.ops]
    assert world.wanted.leaving == world.wanted.killed == []
    known = {one.id for one in world.ops} | {""}
    assert {spec["by"] for spec in world.wanted.replicas.values()} <= known
    for one in world.ops:
        if one.status in ("FAILED", "CANCELLED") and one.kind == "out":
            own = {name for name, spec in world.wanted.replicas.items() if spec["by"] == one.id}
            assert not own, "a newcomer that was taken back is still wanted"
    last = next((one for one in reversed(world.ops) if one.target is not None and one.status != "CANCELLED"), None)
    if last is not None and last.status in ("ACTIVE", "COMPLETED"):
        later = [one for one in world.ops if one.number > last.number and not one.urls and one.status != "NOOP"]
        if not later and not world.gone:
            assert len(world.seen.natives("rollout")) <= max(last.target or 0, 2) if last.kind == "out" else True
