"""`slipstream up` over real processes and a real broker; the services are stand-ins without a model (`fake_service.py`)."""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from pathlib import Path

import psutil
import pytest
import yaml

from services.controller.launchers.broker import read_address
from tests.shared.runs import until

DEADLINE_S = 60.0
RUN = {
    "run": "fake",
    "steps": 4,
    "groups_per_step": 2,
    "samples_per_group": 2,
    "sampling": {"max_new_tokens": 4, "max_prompt_tokens": 16},
    "model": {"path": "model"},
    "prompts": {"source": "task.prompts"},
    "reward": {"functions": [{"path": "task.reward"}]},
    "drain_timeout_s": 5,
    "heartbeat_ttl_s": 5,
}


class Up:
    """One `up` of the run in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.text = folder, ""
        self.workdir = folder / "work"
        self.process: Process | None = None
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text("{}")
        (folder / "run.yaml").write_text(yaml.safe_dump({**RUN, "workdir": str(self.workdir)}))

    async def start(self, *sets: str, fault: str = "", step_s: float = 0.02) -> None:
        command = [sys.executable, "-m", "tests.e2e.up_with_fakes", str(self.folder / "run.yaml"), *sets]
        environment = {**os.environ, "TEST_FAULT": fault, "TEST_STEP_S": str(step_s)}
        self.text = ""
        self.process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT, env=environment)
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")()
        while chunk := await self.process.stdout.read(4096):
            self.text += decoder.decode(chunk)

    async def says(self, words: str) -> None:
        await until(lambda: words in self.text or self._reader.done(), f"up says {words!r}", DEADLINE_S)
        assert words in self.text

    async def ends(self) -> int:
        assert self.process is not None
        await asyncio.wait_for(self._reader, DEADLINE_S)
        return await asyncio.wait_for(self.process.wait(), DEADLINE_S)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def children(self) -> dict[str, psutil.Process]:
        """Service processes by replica."""
        assert self.process is not None
        found = {}
        for child in psutil.Process(self.process.pid).children():
            words = child.cmdline()
            if "--replica" in words:
                found[words[words.index("--replica") + 1]] = child
        return found

    def report(self) -> dict:
        return json.loads((self.workdir / "report.json").read_text())

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        address = read_address(self.workdir / "broker.json")
        if address is not None and psutil.pid_exists(address.pid):
            os.kill(address.pid, signal.SIGKILL)


@pytest.fixture
async def run(tmp_path):
    started = Up(tmp_path)
    yield started
    await started.close()


def gone(processes) -> bool:
    return all(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in processes)


async def test_a_run_from_start_to_report_and_again(run):
    await run.start()
    assert await run.ends() == 0, run.text
    for words in ("started run 'fake'", "step 4/4  reward 0.500  age 0/1", "finished after 4 steps", "report: "):
        assert words in run.text
    report = run.report()
    assert (report["state"], report["steps"], report["trained"], report["balanced"], report["faults"]) == (
        "finished",
        4,
        8,
        True,
        [],
    )
    assert set(report["cpu_seconds"]) == {"controller", "dcs", "reward", "rollout", "trainer"}
    assert report["trainer_busy_share"] == 1.0
    assert "drained" in (run.workdir / "logs/rollout-0.log").read_text()
    assert not psutil.pid_exists(read_address(run.workdir / "broker.json").pid)

    await run.start()
    assert await run.ends() == 0
    assert "is finished; raise `steps`" in run.text

    await run.start("steps=6")
    assert await run.ends() == 0
    assert "going on with run 'fake'" in run.text
    assert "step 4/6" not in run.text, "what was done before is not told again"
    assert "step 6/6" in run.text
    assert run.report()["trained"] == 12


async def test_another_config_cannot_go_on(run):
    await run.start()
    await run.ends()
    await run.start("seed=3")
    assert await run.ends() == 2
    assert "seed: 0 before, 3 now" in run.text
    assert "--set run=NAME" in run.text


async def test_ctrl_c_drains_and_the_same_command_goes_on(run):
    await run.start("steps=400", step_s=0.05)
    await run.says("step 2/400")
    services = list(run.children().values())
    assert len(services) == 5
    run.signal(signal.SIGINT)
    assert await run.ends() == 130
    assert "the same command goes on where it stopped" in run.text
    assert "drained" in (run.workdir / "logs/reward-0.log").read_text()
    assert gone(services)
    done = run.report()["steps"]
    assert 2 <= done < 400
    await run.start(f"steps={done + 2}")
    assert await run.ends() == 0, run.text
    assert run.report()["steps"] == done + 2


async def test_a_service_that_reports_a_failure_ends_the_run(run):
    await run.start("steps=400", fault="reward-0-fails")
    assert await run.ends() == 1
    assert "failed after" in run.text
    assert "reward-0 failed: exit code 1" in run.text
    assert "the disk of this test is full" in run.text
    assert run.report()["state"] == "failed:reward-0 failed: exit code 1"


async def test_a_trainer_that_is_killed_ends_the_run_and_the_same_command_goes_on(run):
    await run.start(fault="trainer-dies")
    assert await run.ends() == 1
    assert "trainer-0 ended before the run was over: killed by SIGKILL" in run.text
    await run.start()
    assert await run.ends() == 0, run.text
    assert run.report()["trained"] == 8


async def test_a_killed_rollout_does_not_end_the_run_and_may_come_back(run):
    await run.start("steps=400", step_s=0.1)
    await run.says("step 1/400")
    run.children()["rollout-0"].kill()
    await run.says("rollout-0 is gone (killed by SIGKILL); the run goes on")
    assert f"slipstream serve rollout --nats {read_address(run.workdir / 'broker.json').url} --run fake" in run.text
    url = read_address(run.workdir / "broker.json").url
    options = ["--nats", url, "--run", "fake", "--replica", "rollout-0", "--parent", str(os.getpid())]
    again = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.e2e.fake_service", "rollout", *options)
    await run.says("rollout-0 is back")
    again.terminate()
    assert await asyncio.wait_for(again.wait(), DEADLINE_S) == 0
    run.signal(signal.SIGTERM)
    assert await run.ends() == 130
    assert "did not drain" not in run.text, "all that is left drains"


async def test_a_killed_broker_is_started_again_and_the_run_finishes(run):
    await run.start("steps=12", step_s=0.2)
    await run.says("step 2/12")
    os.kill(read_address(run.workdir / "broker.json").pid, signal.SIGKILL)
    assert await run.ends() == 0, run.text
    assert "the broker died; started again on its store" in run.text
    assert run.report()["trained"] == 24


async def test_when_up_is_killed_its_services_die_and_the_same_command_goes_on(run):
    await run.start("steps=400", step_s=0.05)
    await run.says("step 2/400")
    services = list(run.children().values())
    run.signal(signal.SIGKILL)
    await run.ends()
    await until(lambda: gone(services), "the services are gone")
    await run.start("steps=6")
    assert await run.ends() == 0, run.text
    assert "going on with" in run.text


async def test_one_up_a_workdir(run, tmp_path):
    await run.start("steps=400", step_s=0.05)
    await run.says("step 1/400")
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.e2e.up_with_fakes", str(tmp_path / "run.yaml"), stdout=PIPE, stderr=PIPE
    )
    _, errors = await asyncio.wait_for(second.communicate(), DEADLINE_S)
    assert second.returncode == 2
    assert f"another `slipstream up` (pid {run.process.pid})" in errors.decode()
    run.signal(signal.SIGINT)
    await run.ends()
