"""Restarts, back-off, giving up and the detection of hung processes, without a process or a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.controller.launchers.supervision import Back, GiveUp, Left, Restart, Rules, Supervisor
from shared.records import Heartbeat

RULES = Rules(silent_s=15.0, start_s=60.0)


def beat(replica: str, pid: int, state: str = "sampling", progress: int = 0, at: float = 0.0) -> Heartbeat:
    service = replica.split("-")[0]
    return Heartbeat(service, replica, state, progress, -1, -1, {}, "host", pid, 0.0, at)


class World:
    """A supervisor with one replica, and time that the test moves."""

    def __init__(self, replica: str = "rollout-0", rules: Rules = RULES) -> None:
        self.supervisor, self.replica, self.now, self.pid = Supervisor(rules), replica, 0.0, 100
        self.start()

    def start(self) -> None:
        self.pid += 1
        self.supervisor.started(self.replica.split("-")[0], self.replica, self.pid, self.now)

    def works(self, seconds: float = 0.0, progress: int = 0, state: str = "sampling") -> Back | None:
        """It beats every second for so long."""
        back = self.supervisor.heard(beat(self.replica, self.pid, state, progress, at=self.now), self.now)
        for _ in range(int(seconds)):
            self.now += 1
            self.supervisor.heard(beat(self.replica, self.pid, state, progress, at=self.now), self.now)
            assert self.supervisor.looked(self.now) == []
        return back

    def dies(self, code: int = -9, how: str = "killed by SIGKILL"):
        return self.supervisor.exited(self.replica, code, how, self.now)

    def restarts(self) -> None:
        one = self.supervisor.watched[self.replica]
        self.now = max(self.now, one.due)
        assert self.supervisor.due(self.now) == [self.replica]
        self.start()
        assert self.supervisor.due(self.now) == []


def test_a_death_is_answered_at_once_and_only_for_that_replica():
    world = World()
    world.supervisor.started("rollout", "rollout-1", 77, 0.0)
    world.works(30)
    decision = world.dies()
    assert decision == Restart(RULES.first_s, "killed by SIGKILL", 1)
    assert world.supervisor.due(world.now) == []
    assert world.supervisor.due(world.now + 0.2) == ["rollout-0"]
    assert world.supervisor.waits_for() == ["rollout-0"]


def test_back_tells_how_long_it_was_gone():
    world = World()
    world.works(30)
    world.dies()
    died = world.now
    world.restarts()
    world.now += 2
    assert world.works(state="starting") is None
    world.now += 2
    assert world.works() == Back("rollout-0", world.pid, world.now - died)
    assert world.supervisor.waits_for() == []


def test_the_pause_doubles_up_to_its_limit_and_a_steady_time_forgives():
    world = World()
    delays = []
    for _ in range(9):
        delays.append(world.dies().delay_s)
        world.restarts()
    assert delays == [0.1, 1, 2, 4, 8, 16, 30, 30, 30]
    world.works(RULES.steady_s + 1)
    assert world.dies().delay_s == 0.1


def test_who_does_not_stay_up_is_told_once():
    world = World()
    said = []
    for _ in range(8):
        said.append(world.dies(-11, "killed by SIGSEGV").say)
        world.restarts()
    assert [bool(text) for text in said] == [False, False, True, False, False, False, False, False]
    assert "rollout-0 does not stay up (killed by SIGSEGV)" in said[2]
    assert "the run waits for it" in said[2]


def test_reported_failures_are_bounded():
    world = World()
    assert isinstance(world.dies(1, "exit code 1"), Restart)
    world.restarts()
    assert isinstance(world.dies(1, "exit code 1"), Restart)
    world.restarts()
    assert world.dies(1, "exit code 1: no disk") == GiveUp(
        "rollout-0 failed 3 times without getting any further: exit code 1: no disk"
    )


def test_kills_never_end_a_run_and_do_not_count_as_failures():
    world = World()
    for code in (1, -9, -9, 1, -9, -9, -9):
        assert isinstance(world.dies(code), Restart)
        world.restarts()
    assert isinstance(world.dies(1), GiveUp)


def test_a_trainer_must_get_further_to_be_forgiven():
    world = World("trainer-0")
    for step in (5, 9, 12):  # fails again and again, but each time later
        world.works(40, progress=step)
        assert isinstance(world.dies(1), Restart)
        world.restarts()
    world.works(100, progress=12)
    assert isinstance(world.dies(1), Restart)
    world.restarts()
    world.works(100, progress=11)
    assert isinstance(world.dies(1), GiveUp), (
        "a step that fails after every resume ends the run, however long each try takes"
    )


def test_others_are_forgiven_by_a_steady_time():
    world = World()
    for _ in range(10):
        world.works(RULES.steady_s + 1)
        assert isinstance(world.dies(1), Restart)
        world.restarts()


def test_a_wrong_config_ends_the_run_at_once():
    assert World().dies(2, "exit code 2: reward.functions[0]: cannot import") == GiveUp(
        "rollout-0 cannot use the config: exit code 2: reward.functions[0]: cannot import"
    )


@pytest.mark.parametrize(("code", "words"), [(3, "cannot reach the broker"), (4, "role taken by another")])
def test_the_broker_and_a_taken_role_are_waited_for(code, words):
    world = World("dcs-0")
    said, delays = [], []
    for _ in range(20):
        decision = world.dies(code, f"exit code {code}")
        said.append(decision.say)
        delays.append(decision.delay_s)
        world.restarts()
    assert words in said[0]
    assert not any(said[1:])
    assert max(delays) == RULES.patient_s


def test_who_was_asked_to_stop_is_not_started_again():
    world = World()
    world.supervisor.started("rollout", "rollout-1", 55, 0.0)
    world.works(5)
    decision = world.dies(0, "exit code 0")
    assert decision == Left("rollout-0 was asked to stop and left")
    assert world.supervisor.due(1e9) == []
    assert world.supervisor.waits_for() == []
    last = world.supervisor.exited("rollout-1", 0, "exit code 0", world.now)
    assert "that was the last rollout, and the run waits for another one" in last.say


@pytest.mark.parametrize("service", ["trainer", "dcs", "controller"])
def test_a_run_without_these_is_none_so_they_come_back(service):
    world = World(f"{service}-0")
    world.works(5)
    assert isinstance(world.dies(0, "exit code 0"), Restart)


def test_silence_is_found_and_its_cause_kept():
    world = World()
    world.works(10)
    hung = []
    for _ in range(20):
        world.now += 1
        world.supervisor.heard(
            beat("rollout-0", world.pid, at=10.0), world.now
        )  # the old one still lies in the registry
        hung += world.supervisor.looked(world.now)
    assert [one.replica for one in hung] == ["rollout-0"], "it is accused once"
    assert "lived without a heartbeat for 16 s, last state 'sampling'" in hung[0].cause
    assert world.dies().cause == hung[0].cause, "what is told is the hang, not the SIGKILL that ended it"


def test_a_slow_machine_is_not_mistaken_for_a_hang_for_ever():
    world = World()

    def silence() -> float:
        world.supervisor.looked(world.now)
        world.works(1)
        began = world.now
        while not world.supervisor.looked(world.now):
            world.now += 1
        return round(world.now - began)

    for expected in (15, 30, 60, 120):
        assert silence() == expected
        world.dies()
        world.restarts()
    world.works(RULES.steady_s + 1)
    world.dies()
    world.restarts()
    assert silence() == 15


def test_a_first_heartbeat_has_more_time():
    world = World()
    hung = []
    for _ in range(70):
        world.now += 1
        hung += world.supervisor.looked(world.now)
    assert "never showed a heartbeat" in hung[0].cause
    assert "61 s" in hung[0].cause


@pytest.mark.parametrize("silent_s", [2.0, 15.0])
def test_time_that_nobody_looked_accuses_nobody(silent_s):
    world = World(rules=Rules(silent_s))
    world.works(10)
    world.now += 3600  # the launcher slept
    assert world.supervisor.looked(world.now) == []
    for _ in range(100):
        world.now += 10  # the broker is away
        world.supervisor.blind()
    assert world.supervisor.looked(world.now) == []
    world.works(5)


def test_after_a_broker_that_was_away_silence_counts_anew():
    world = World()
    world.works(5)
    for _ in range(20):
        world.now += RULES.silent_s * 0.9
        assert world.supervisor.looked(world.now) == []
        world.supervisor.blind()
        assert world.supervisor.looked(world.now) == []
    for _ in range(20):
        world.now += 1
        if world.supervisor.looked(world.now):
            return
    raise AssertionError("a hang must be found all the same")


def test_clocks_of_others_do_not_matter():
    world = World()
    world.works(5)
    for at in (1e12, -5.0, 1e12, 3.0):  # that host's clock jumps about
        world.now += 10
        world.supervisor.heard(beat("rollout-0", world.pid, at=at), world.now)
        assert world.supervisor.looked(world.now) == []


def test_a_heartbeat_of_the_dead_predecessor_counts_for_nobody():
    world = World()
    world.works(30)
    old = world.pid
    world.dies()
    world.restarts()
    assert world.supervisor.heard(beat("rollout-0", old, at=99.0), world.now) is None
    assert world.supervisor.waits_for() == ["rollout-0"]


@given(st.lists(st.sampled_from(["signal", "fail", "broker", "steady", "beat", "leave"]), max_size=40))
def test_every_replica_is_started_again_or_the_reason_is_told(history):
    """Whatever happens, afterwards the replica runs, is due at a known time, left on purpose, or the run was given up."""
    world = World()
    codes = {"signal": -9, "fail": 1, "broker": 3, "leave": 0}
    for event in history:
        if event in ("steady", "beat"):
            world.works(RULES.steady_s + 1 if event == "steady" else 1)
            continue
        decision = world.dies(codes[event])
        if isinstance(decision, GiveUp | Left):
            return
        assert 0 < decision.delay_s <= RULES.longest_s
        world.restarts()
