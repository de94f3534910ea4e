"""Which changes an existing run can follow, and what is said of the others."""

import pytest

from services.controller.attach import attach
from services.controller.launchers.resume import Before, changes, forbidden, settle
from shared.config import ConfigError, RunConfig
from tests.shared.runs import make_config


def config(run: str = "demo", **fields) -> RunConfig:
    return make_config(run, **fields)


def test_steps_and_replicas_may_change():
    after = config(steps=9, rollout={"replicas": 3}, reward={"functions": [{"path": "task.reward"}], "replicas": 2})
    assert set(changes(config(), after)) == {"steps", "rollout.replicas", "reward.replicas"}
    assert forbidden(config(), after) == {}


def test_what_the_result_depends_on_may_not():
    after = config(seed=1, groups_per_step=4, trainer={"optimizer": {"lr": 0.5}, "checkpoint": {"every": 3}})
    assert forbidden(config(), after) == {
        "seed": (0, 1),
        "groups_per_step": (2, 4),
        "trainer.optimizer.lr": (1e-6, 0.5),
    }


def test_a_promise_can_be_given_up_but_not_made_half_way():
    assert forbidden(config(deterministic=True), config(deterministic=False)) == {}
    assert forbidden(config(), config(deterministic=True)) == {"deterministic": (False, True)}


def test_a_section_that_appears_is_a_change():
    after = config(trainer={"warm_start": {"source": "task.demonstrations", "steps": 3}})
    assert "trainer.warm_start" in {path.rpartition(".")[0] or path for path in forbidden(config(), after)}


def test_the_workdir_may_move_with_its_private_broker_only():
    assert forbidden(config(workdir="/a"), config(workdir="/b")) == {}
    elsewhere = {"url": "nats://127.0.0.1:4222"}
    assert forbidden(config(workdir="/a", broker=elsewhere), config(workdir="/b", broker=elsewhere)) == {
        "workdir": ("/a", "/b")
    }


async def test_settling_a_run(broker, run_name):
    async with attach(broker.url, run_name, create=True) as run:
        assert await settle(run, config(run_name)) == Before()
        await run.set_state("finished")
        assert await settle(run, config(run_name, steps=5)) == Before("finished", 1)
        assert (await run.config()).steps == 5
        with pytest.raises(ConfigError, match=r"seed: 0 before, 7 now[\s\S]*--set run=NAME[\s\S]*delete"):
            await settle(run, config(run_name, steps=5, seed=7))
        assert (await run.config()).seed == 0


def test_a_finished_run_has_nothing_left_unless_more_steps_are_asked_for():
    assert Before("finished", 10).finished(10)
    assert not Before("finished", 10).finished(11)
    assert not Before("running", 10).finished(10)
    assert not Before().finished(1)
