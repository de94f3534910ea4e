"""The whole system on the example, with nothing faked: Megatron, the light engine, gloo broadcasts, a real broker.

One run is harmed while it goes on: a rollout replica, the reward service and the controller are killed with SIGKILL (`up`
starts them again); a newcomer joins with the broker's address and the run's name only, is killed too and started again by hand,
and does the rest alone; a second trainer is refused. The run must finish, and its books must balance.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from services.controller.attach import Run, attach
from services.controller.launchers.broker import read_address, serving
from shared import config as run_config
from shared import wire
from shared.ledger import Ledger
from shared.metric_names import find
from shared.records import Heartbeat, Metric, Receipt
from tests.processes import replicas
from tests.shared.runs import until
from tests.tied import tied

EXAMPLE = Path(__file__).parents[2] / "examples/sort_letters/run.yaml"
STEPS, GROUPS = 40, 16
DEADLINE_S = 600.0
ALREADY_ACTIVE = 4


class Example:
    """`slipstream up` on the example, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.workdir = folder / "runs/sort-letters"
        self.report = folder / "report.json"
        self.processes: list[Process] = []

    async def cli(self, *arguments: str) -> Process:
        return await self.starts("services.controller.cli", *arguments)

    async def starts(self, module: str, *arguments: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            *tied(sys.executable, "-m", module, *arguments),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[2]), "OMP_NUM_THREADS": "1"},
            stdin=DEVNULL,
            stdout=(self.folder / "output.txt").open("ab"),
            stderr=STDOUT,
        )
        self.processes.append(process)
        return process

    async def up(self, *sets: str) -> Process:
        options = [
            part for value in (f"steps={STEPS}", f"model.path={self.folder}/model", *sets) for part in ("--set", value)
        ]
        return await self.cli("up", str(EXAMPLE), *options, "--report", str(self.report))

    @property
    def text(self) -> str:
        """The end of all that its commands said."""
        return (self.folder / "output.txt").read_text(errors="replace")[-4000:]

    async def ends(self, process: Process) -> int:
        """Its exit code. The deadline is for one that says nothing more."""
        output = self.folder / "output.txt"
        while process.returncode is None:
            said = output.stat().st_size
            await until(
                lambda: process.returncode is not None or output.stat().st_size > said,  # noqa: B023 - of this round
                "it goes on or ends",
                DEADLINE_S,
            )
        return process.returncode

    async def url(self) -> str:
        file = self.workdir / "broker.json"
        await until(lambda: read_address(file), "the private broker is up", DEADLINE_S)
        address = read_address(file)
        assert address is not None
        return address.url

    @asynccontextmanager
    async def attached(self) -> AsyncIterator[Run]:
        url = await self.url()
        async with attach(url, "sort-letters", create=True) as run:
            await until(run.state, "the run is set up", DEADLINE_S)
            yield run

    async def close(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
                await process.wait()


@pytest.fixture
async def example(tmp_path: Path) -> AsyncIterator[Example]:
    example = Example(tmp_path)
    yield example
    await example.close()


async def until_trained(run: Run, groups: int) -> None:
    """Read receipts until so many groups are trained."""
    ledger = Ledger()
    async with asyncio.timeout(DEADLINE_S):
        async for message, _ in run.queue.read("receipts", live=True):
            ledger.apply(wire.decode(message, Receipt))
            if ledger.trained >= groups:
                return


async def heartbeat(run: Run, replica: str) -> Heartbeat | None:
    return next((beat for beat in await run.registry.alive() if beat.replica == replica), None)


async def kill(run: Run, replica: str) -> None:
    """As soon as it is there; a heartbeat may outlive its process."""

    async def struck() -> bool:
        with suppress(ProcessLookupError):
            if (beat := await heartbeat(run, replica)) is not None:
                os.kill(beat.pid, signal.SIGKILL)
                return True
        return False

    await until(struck, f"{replica} is there", DEADLINE_S)


async def let_go(run: Run, up: Process, *names: str) -> None:
    """Ask replicas of `up` to leave. One that has not come so far that it would drain is asked again."""

    async def gone() -> bool:
        there = [name for name in names if name in replicas(up.pid)]
        for name in there:
            beat = await heartbeat(run, name)
            if beat is not None and beat.pid == replicas(up.pid).get(name):
                with suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGTERM)
        return not there

    await until(gone, f"{names} have left", DEADLINE_S)


@asynccontextmanager
async def left_by(example: Example) -> AsyncIterator[Run]:
    """What a run that is over left in its store."""
    config = run_config.load(EXAMPLE, [f"workdir={example.workdir}"])
    async with serving(config) as url, attach(url, config.run) as run:
        yield run


async def undeclared_metrics(example: Example) -> set[tuple[str, str]]:
    """Names that the run emitted and that shared/metric_names.py does not know."""
    async with left_by(example) as run:
        metrics = [wire.decode(message, Metric) async for message, _ in run.queue.read("metrics")]
    assert {metric.service for metric in metrics} >= {"controller", "dcs", "reward", "rollout", "trainer"}
    emitted = {(metric.service, name) for metric in metrics for name in metric.values}
    return {(service, name) for service, name in emitted if find(service, name) is None}


async def test_a_run_survives_the_death_of_services_and_takes_in_a_newcomer(example: Example):
    up = await example.up()
    async with example.attached() as run:
        by_hand = ("serve", "rollout", "--nats", run.url, "--run", run.name, "--replica", "newcomer")
        await until_trained(run, 3 * GROUPS)
        await example.cli(*by_hand)
        second_trainer = await example.cli("serve", "trainer", "--nats", run.url, "--run", run.name)
        for number, replica in enumerate(("rollout-1", "reward-0", "controller-0"), start=1):
            await until_trained(run, (3 + 3 * number) * GROUPS)
            await kill(run, replica)
        await let_go(run, up, "rollout-0", "rollout-1")  # from here on the run cannot end without the newcomer
        assert await asyncio.wait_for(second_trainer.wait(), DEADLINE_S) == ALREADY_ACTIVE, example.text
        await kill(run, "newcomer")
        await example.cli(*by_hand)
        await until(lambda: up.returncode is not None, "the run ends", DEADLINE_S)
    assert up.returncode == 0, example.text
    report = json.loads(example.report.read_text())
    assert report["balanced"], report["faults"]
    assert report["faults"] == []
    assert report["trained"] == STEPS * GROUPS
    assert report["pending"] == 0
    assert report["staleness_max"] <= 1
    assert report["reward_last"] > report["reward_first"] + 0.2
    assert report["replicas"]["newcomer"]["trained"] > 0, "the newcomer took no part"
    assert report["replicas"]["rollout-1"]["trained"] > 0
    assert await undeclared_metrics(example) == set(), "declare them in shared/metric_names.py"


async def test_ctrl_c_drains_and_the_same_command_goes_on(example: Example):
    sets = ("trainer.warm_start.steps=40", "eval.prompts=null")
    up = await example.up(*sets, "steps=5000")
    async with example.attached() as run:
        await until_trained(run, 3 * GROUPS)
        up.send_signal(signal.SIGINT)
        await until(lambda: up.returncode is not None, "the run drains", DEADLINE_S)
    assert up.returncode == 130, example.text
    stopped = json.loads(example.report.read_text())
    assert stopped["faults"] == []
    assert stopped["trained"] == stopped["steps"] * GROUPS >= 3 * GROUPS
    steps = stopped["steps"] + 4
    again = await example.up(*sets, f"steps={steps}")
    async with asyncio.timeout(DEADLINE_S):
        assert await again.wait() == 0, example.text
    finished = json.loads(example.report.read_text())
    assert finished["balanced"]
    assert finished["trained"] == steps * GROUPS
    assert finished["issued"] == finished["trained"] + sum(finished["dropped"].values())


async def test_a_killed_trainer_goes_on_from_its_checkpoint(example: Example):
    up = await example.up("steps=16", "trainer.warm_start.steps=40", "eval.prompts=null", "trainer.checkpoint.every=4")
    async with example.attached() as run:
        await until_trained(run, 6 * GROUPS)
        await kill(run, "trainer-0")
        await until(lambda: up.returncode is not None, "the run ends", DEADLINE_S)
    assert up.returncode == 0, example.text
    report = json.loads(example.report.read_text())
    assert report["balanced"], report["faults"]
    assert report["rollbacks"] == 1
    assert report["trained"] == 16 * GROUPS
    assert report["staleness_max"] <= 1


async def test_the_audit_of_a_finished_run_needs_only_its_folder(example: Example):
    up = await example.up("steps=3", "trainer.warm_start.steps=20", "eval.prompts=null")
    async with asyncio.timeout(DEADLINE_S):
        assert await up.wait() == 0, example.text
    checked = await example.cli("audit", str(EXAMPLE), "--set", f"model.path={example.folder}/model")
    async with asyncio.timeout(DEADLINE_S):
        assert await checked.wait() == 0, example.text
