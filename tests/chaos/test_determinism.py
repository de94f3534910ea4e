"""`deterministic: true`: two runs of a seed, and runs killed at every point of a step, end in the same weights, bit for bit.

Real services, a real broker, Megatron, the light engine and gloo broadcasts, on the example's task, with weights that may be one
step old, a filter that drops groups, and finished samples that are kept. What is compared is the digest of every step's weights.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.controller.attach import Run, attach
from services.controller.audit import Audit, audit
from services.controller.evidence import gather
from shared import wire
from shared.broker import EmbeddedBroker
from shared.config import RunConfig, parse
from shared.failpoints import POINTS
from shared.ledger import Ledger
from shared.records import Receipt
from tests.chaos.fork import Forks, call
from tests.shared.runs import until

EXAMPLE = Path(__file__).parents[2] / "examples/sort_letters"
STEPS, GROUPS = 14, 4
DEADLINE_S = 1200.0
LEASE_S = 8.0
"""Of a role whose holder is stopped: a holder that is only slow should not lose it."""

OF_THE_TRAINER = [
    "trainer.updated:2",
    "trainer.receipts:2",
    "trainer.told:2",
    "weights.snapshot",
    "weights.snapshot:2",
    "weights.announced",
    "weights.announced:2",
    "weights.sent:2",
    "checkpoint.begun",
    "checkpoint.writing:3",
    "checkpoint.written",
    "checkpoint.named",
    "checkpoint.purging",
    "trainer.saved",
    "trainer.acked:2",
    "trainer.covered",
    "trainer.taken",
    "trainer.rolled_back",
]
OF_OTHERS = {
    "rollout-0": ["rollout.kept:6", "rollout.sampled:3", "rollout.stored:3", "rollout.acked:3", "rollout.switched"],
    "reward-0": ["reward.scored:4", "reward.stored:4", "advantages.begun:4", "advantages.stored:4"],
    "controller-0": ["controller.issued:3", "controller.sent:2", "controller.over"],
    "dcs-0": ["dcs.allocated:2", "dcs.decided:2", "dcs.announced:2", "dcs.purging:2"],
    "trainer-0": ["trainer.told:3"],
}


@dataclass
class Outcome:
    """What a run leaves."""

    digests: dict[int, str]
    """Of each step's weights."""
    audit: Audit
    rollbacks: int
    fired: list[str]
    carried_on: int
    """Groups of which a replica found finished samples of another."""


def make_model(folder: str) -> None:
    """In a fork: a model that has learnt enough that rewards differ."""
    from services.trainer.megatron.policy import Policy
    from services.trainer.start import demonstrations
    from services.trainer.warm_start import run_warm_start
    from shared.sections import TrainerConfig, WarmStartConfig

    random, warm = f"{folder}-random", WarmStartConfig(source="task.demonstrations", steps=100, batch=32)
    config = configure("model", random, "unused")
    config.function("task.build_model", "model.build")(random, 0)
    policy = Policy.create(random, TrainerConfig(), seed=0)
    run_warm_start(policy, demonstrations(config, warm), warm, token_budget=2048, on_step=lambda step: None)
    policy.save_hf(folder)


def configure(run: str, model: str, workdir: str, **changes: Any) -> RunConfig:
    data: dict[str, Any] = {
        "run": run,
        "base": str(EXAMPLE),
        "workdir": workdir,
        "deterministic": True,
        "steps": STEPS,
        "groups_per_step": GROUPS,
        "samples_per_group": 4,
        "model": {"path": model},
        "prompts": {"source": "task.prompts", "size": 4096},
        "sampling": {"max_new_tokens": 6},
        "reward": {
            "functions": [{"path": "tests.chaos.partial_credit.reward"}],
            "filters": ["unscorable", "zero_variance"],
        },
        "algorithm": {"name": "grpo", "old_logprobs": "rollout"},
        "trainer": {"optimizer": {"lr": 1e-3}, "checkpoint": {"every": 2, "keep": 2}, "device": "cpu"},
        "rollout": {"device": "cpu", "apart_from_tokens": 1, "keep_after_s": 0},
        "redeliver_after_s": 3,
        "dcs": {"timeout_s": 20},
    }
    for name, value in changes.items():
        data[name] = data[name] | value if isinstance(value, dict) else value
    return parse(data, run)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "warm"
    call("tests.chaos.test_determinism:make_model", str(folder))
    return folder


@pytest.fixture(scope="module")
async def quiet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The run that nobody disturbs."""
    return await run_once(model, tmp_path_factory.mktemp("quiet"), ("rollout-0",))


Disturb = Callable[[Run, Forks], Coroutine[Any, Any, None]]


async def run_once(
    model: Path,
    folder: Path,
    rollouts: tuple[str, ...],
    points: dict[str, list[str]] | None = None,
    disturb: Disturb | None = None,
    **changes: Any,
) -> Outcome:
    config = configure("exact", str(model), str(folder / "work"), **changes)
    with EmbeddedBroker(folder / "broker") as broker:
        async with attach(broker.url, config.run, create=True) as run:
            await run.kv.create("config", config.dump())
            await run.queue.ensure_streams(config)
            await run.set_state("running")
            replicas = ("dcs-0", "controller-0", "trainer-0", "reward-0", *rollouts)
            plan = {replica: list(names) for replica, names in (points or {}).items()}
            forks = Forks(broker.url, config.run, folder / "logs", replicas, plan)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(forks.finish(DEADLINE_S))
                if disturb is not None:
                    tasks.create_task(disturb(run, forks))
            evidence = await gather(run.queue, run.kv, with_metrics=True)
    shutil.rmtree(folder / "broker")
    digests: dict[int, str] = {}
    for told in evidence.announced:
        assert digests.setdefault(told.step, told.digest) == told.digest, f"step {told.step} was not repeated"
    carried_on = sum(event.kind == "carried_on" for event in evidence.events)
    return Outcome(digests, audit(evidence), evidence.ledger().rollbacks, forks.fired, carried_on)


def check(outcome: Outcome, quiet: Outcome) -> None:
    faults = [f"{check.name}: {fault}" for check in outcome.audit.checks for fault in check.faults]
    assert faults == []
    assert sorted(outcome.digests) == list(range(STEPS + 1))
    assert outcome.digests == quiet.digests
    assert outcome.audit.trained == STEPS * GROUPS
    assert outcome.audit.dropped == quiet.audit.dropped
    assert outcome.audit.ages == quiet.audit.ages


def test_every_failpoint_is_tried() -> None:
    tried = {point.partition(":")[0] for names in ({"t": OF_THE_TRAINER} | OF_OTHERS).values() for point in names}
    assert tried == set(POINTS)


def test_the_quiet_run_is_worth_comparing_with(quiet: Outcome) -> None:
    check(quiet, quiet)
    assert len(set(quiet.digests.values())) == STEPS + 1, "every update changed the weights"
    assert quiet.audit.dropped["zero_variance"] > 0, "some groups were dropped"
    assert set(quiet.audit.ages) == {0, 1}, "weights were up to one step old"


async def test_another_run_of_the_seed_on_other_replicas(model: Path, quiet: Outcome, tmp_path: Path) -> None:
    """Two that take one group at a time, so that drawing a round lasts longer than the update that it overlaps with."""
    outcome = await run_once(model, tmp_path, ("rollout-0", "rollout-1"), rollout={"max_running_groups": 1})
    check(outcome, quiet)


async def test_a_trainer_killed_in_every_phase_of_a_step(model: Path, quiet: Outcome, tmp_path: Path) -> None:
    outcome = await run_once(model, tmp_path, ("rollout-0",), {"trainer-0": OF_THE_TRAINER})
    assert outcome.fired == OF_THE_TRAINER
    # Met while the resumed weights go out, perhaps before the receipt; the last one certainly.
    early = {"weights.snapshot", "weights.announced", "trainer.taken"}
    assert len(OF_THE_TRAINER) - len(early) <= outcome.rollbacks <= len(OF_THE_TRAINER)
    check(outcome, quiet)


async def test_everybody_else_killed_in_every_phase(model: Path, quiet: Outcome, tmp_path: Path) -> None:
    outcome = await run_once(model, tmp_path, ("rollout-0", "rollout-1"), OF_OTHERS)
    assert sorted(outcome.fired) == sorted(point for names in OF_OTHERS.values() for point in names)
    assert outcome.carried_on > 0
    check(outcome, quiet)


@pytest.mark.parametrize("service", ["trainer", "controller"])
async def test_one_that_is_stopped_replaced_and_woken_again(
    service: str, model: Path, quiet: Outcome, tmp_path: Path
) -> None:
    """What it still wants to do is refused, or does not count; then it ends."""
    old, new = f"{service}-0", f"{service}-1"
    codes: dict[str, int] = {}

    async def disturb(run: Run, forks: Forks) -> None:
        await until_step(run, 3)
        forks.send(old, signal.SIGSTOP)
        forks.doom(old)
        forks.start(new)  # takes the role over when the lease has run out
        await until_step(run, 6, epoch=2 if service == "trainer" else 0)
        forks.send(old, signal.SIGCONT)
        await until(lambda: old in forks.ended, f"{old} ends", DEADLINE_S)
        codes.update(forks.ended)

    outcome = await run_once(model, tmp_path, ("rollout-0",), disturb=disturb, heartbeat_ttl_s=LEASE_S)
    assert codes[old] in (1, 4)
    check(outcome, quiet)


async def until_step(run: Run, step: int, epoch: int = 0) -> None:
    """Until so many updates are on record, by a trainer of this epoch or a later one."""
    ledger = Ledger()
    async with asyncio.timeout(DEADLINE_S):
        async for message, _ in run.queue.read("receipts", live=True):
            ledger.apply(wire.decode(message, Receipt))
            if ledger.epoch >= epoch and ledger.trained >= step * GROUPS:
                return


async def test_another_seed_gives_other_weights(model: Path, quiet: Outcome, tmp_path: Path) -> None:
    outcome = await run_once(model, tmp_path, ("rollout-0",), seed=1, steps=2)
    assert outcome.digests[0] == quiet.digests[0]
    assert outcome.digests[1] != quiet.digests[1]
