"""The launcher's side of scale operations: what is started, let go, and given up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.controller.launchers.elastic import Elastic, for_run
from services.controller.launchers.supervision import GiveUp, Left, Restart, Rules, Supervisor
from shared import permissions
from shared.wanted import Wanted
from tests.controller.pipeline import run_config


def spec(service: str = "rollout", by: str = "") -> dict[str, str]:
    return {"service": service, "by": by, "engine_url": ""}


class Launcher:
    kind = "test"

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def terminate(self, replica: str) -> None:
        self.done.append(("terminate", replica))

    def kill(self, replica: str) -> None:
        self.done.append(("kill", replica))


class World:
    def __init__(self) -> None:
        self.launcher, self.supervisor = Launcher(), Supervisor(Rules(silent_s=15.0))
        self.started: list[str] = []
        run: Any = None
        launcher: Any = self.launcher
        self.elastic = Elastic(run, launcher, self.supervisor, self.start)

    async def start(self, replica: str, service: str) -> None:
        self.started.append(replica)
        self.supervisor.started(service, replica, 1, 0.0)

    def exits(self, replica: str, code: int) -> Any:
        decision = self.supervisor.exited(replica, code, f"exit code {code}", 1.0)
        if isinstance(decision, Left):
            self.elastic.left(replica, decision.say)
        return decision


async def test_what_is_wanted_is_started_once_and_what_is_not_is_let_go():
    world = World()
    record = Wanted({"rollout-0": spec(), "rollout-1": spec(by="op")})
    for _ in range(2):
        await world.elastic.reconcile(record)
    assert world.started == ["rollout-0", "rollout-1"]
    less = Wanted({"rollout-0": spec()}, ["rollout-1"])
    for _ in range(2):
        await world.elastic.reconcile(less)
    assert world.launcher.done == [("terminate", "rollout-1")]
    await world.elastic.reconcile(Wanted({"rollout-0": spec()}, [], ["rollout-1"]))
    assert world.launcher.done[1:] == [("kill", "rollout-1")]
    assert world.exits("rollout-1", -9) == Left(""), "its end is no death"
    assert world.elastic.gone == {}
    await world.elastic.reconcile(record)
    assert world.started == ["rollout-0", "rollout-1", "rollout-1"], "wanted again"


async def test_who_leaves_by_itself_is_told_and_not_started_again():
    world = World()
    record = Wanted({"rollout-0": spec(), "rollout-1": spec()})
    await world.elastic.reconcile(record)
    assert isinstance(world.exits("rollout-1", 0), Left)
    await world.elastic.reconcile(record)
    assert world.started == ["rollout-0", "rollout-1"]
    assert world.elastic.gone.keys() == {"rollout-1"}
    assert isinstance(world.exits("rollout-0", -9), Restart)


async def test_a_newcomer_that_cannot_run_fails_its_operation_and_not_the_run():
    world = World()
    record = Wanted({"rollout-0": spec(), "rollout-1": spec(by="op")})
    await world.elastic.reconcile(record)
    for replica, given_up in (("rollout-0", False), ("rollout-1", True)):
        assert isinstance(world.exits(replica, 2), GiveUp)
        assert world.elastic.gives_up(replica, "exit code 2: no such model") == given_up
    assert world.elastic.gone == {"rollout-1": "exit code 2: no such model"}
    await world.elastic.reconcile(Wanted({"rollout-0": spec()}))
    assert world.elastic.gone == {}


def test_who_launches_may_say_so_at_a_broker_that_asks_for_permissions():
    mine = "$KV.r_services.launcher.*"
    assert [role for role in permissions.ROLES if mine in permissions.of(role, ["r"])["publish"]["allow"]] == [
        "operator"
    ]


def test_a_run_goes_on_as_it_was_scaled_unless_its_file_says_another_number(tmp_path: Path):
    config = run_config("r", str(tmp_path), rollout={"replicas": 2})
    record = for_run(Wanted(), config)
    assert list(record.replicas) == ["reward-0", "rollout-0", "rollout-1"]
    record.replicas["rollout-2"] = spec(by="op")
    assert "rollout-2" in for_run(record, config).replicas
    other = run_config("r", str(tmp_path), rollout={"replicas": 1})
    assert list(for_run(record, other).replicas) == ["reward-0", "rollout-0"]
