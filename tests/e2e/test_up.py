"""`slipstream up` over real processes and a real broker; the services are stand-ins without a model (`fake_service.py`)."""

from __future__ import annotations

import asyncio
import codecs
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from services.controller.attach import attach
from services.controller.launchers.broker import read_address
from shared.records import Event
from shared.wanted import Wanted, change
from shared.wire import decode
from tests.processes import ended, is_broker, replicas
from tests.shared.runs import until

DEADLINE_S = 300.0
RUN = {
    "run": "fake",
    "steps": 4,
    "groups_per_step": 2,
    "samples_per_group": 2,
    "sampling": {"max_new_tokens": 4, "max_prompt_tokens": 16},
    "model": {"path": "model"},
    "prompts": {"source": "task.prompts"},
    "reward": {"functions": [{"path": "task.reward"}]},
    "drain_timeout_s": 60,
    "heartbeat_ttl_s": 60,
}
HASTY = "heartbeat_ttl_s=3"
"""Where silence is to be found. On a machine that stands still for as long others may be taken for hung as well: no harm."""


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

    def replicas(self) -> dict[str, int]:
        """Process ids of the services."""
        assert self.process is not None
        return replicas(self.process.pid)

    def report(self) -> dict:
        return json.loads((self.workdir / "report.json").read_text())

    async def events(self, service: str) -> list[dict]:
        """What `slipstream events` lists of a service, while the run goes on or afterwards."""
        command = [sys.executable, "-m", "services.controller.cli", "events", str(self.folder / "run.yaml")]
        process = await asyncio.create_subprocess_exec(*command, "--service", service, "--json", stdout=PIPE)
        output, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
        return [json.loads(line) for line in output.splitlines()]

    async def close(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        address = read_address(self.workdir / "broker.json")
        if address is not None and is_broker(address.pid):
            with suppress(ProcessLookupError):
                os.kill(address.pid, signal.SIGKILL)


@pytest.fixture
async def run(tmp_path):
    started = Up(tmp_path)
    yield started
    await started.close()


async def by_up(run: Up, service: str) -> list[dict]:
    """The events of a service that the launcher told."""
    return [event for event in await run.events(service) if event["detail"].get("by") == "up"]


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
    assert ended(read_address(run.workdir / "broker.json").pid)

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
    await run.start("steps=400", step_s=0.25)
    await run.says("step 2/400")
    services = list(run.replicas().values())
    assert len(services) == 5
    run.signal(signal.SIGINT)
    assert await run.ends() == 130
    assert "the same command goes on where it stopped" in run.text
    assert "drained" in (run.workdir / "logs/reward-0.log").read_text()
    assert all(map(ended, services))
    done = run.report()["steps"]
    assert 2 <= done < 400
    await run.start(f"steps={done + 2}")
    assert await run.ends() == 0, run.text
    assert run.report()["steps"] == done + 2


async def test_a_service_that_reports_a_failure_again_and_again_ends_the_run(run):
    await run.start("steps=400", fault="reward-0-fails", step_s=0.25)
    assert await run.ends() == 1
    why = "reward-0 failed 3 times without getting any further: exit code 1: the disk of this test is full"
    assert "failed after" in run.text
    assert f"steps: {why}" in run.text
    assert run.report()["state"] == f"failed:{why}"
    assert [event["kind"] for event in await run.events("reward")].count("exit") == 3


async def test_a_killed_trainer_is_started_again(run):
    await run.start(fault="trainer-dies")
    assert await run.ends() == 0, run.text
    assert "trainer-0 died (killed by SIGKILL); it is started again" in run.text
    assert run.report()["trained"] == 8


async def test_a_killed_service_comes_back_and_nobody_else_is_touched(run):
    await run.start("steps=400", step_s=0.25)
    await run.says("step 1/400")
    before = run.replicas()
    os.kill(before["rollout-0"], signal.SIGKILL)
    await run.says("rollout-0 is back after")
    after = run.replicas()
    assert [name for name in before if before[name] != after[name]] == ["rollout-0"]
    run.signal(signal.SIGTERM)
    assert await run.ends() == 130
    assert "did not drain" not in run.text
    story = {event["kind"]: event for event in await by_up(run, "rollout")}
    assert list(story) == ["exit", "restart", "back"]
    assert story["exit"]["detail"]["pid"] == before["rollout-0"]
    assert story["restart"]["detail"]["cause"] == "killed by SIGKILL"
    assert story["back"]["detail"]["pid"] == after["rollout-0"]
    assert 0 < story["restart"]["detail"]["down_s"] < story["back"]["detail"]["down_s"]


async def test_a_hung_service_is_found_by_its_silence_and_replaced(run):
    await run.start("steps=4000", HASTY, step_s=0.1)
    await run.says("step 1/4000")
    await until(lambda: "controller-0" in run.replicas(), "it is there", DEADLINE_S)
    stopped = run.replicas()["controller-0"]
    os.kill(stopped, signal.SIGSTOP)
    await until(lambda: run.replicas().get("controller-0", stopped) != stopped, "another one is there", DEADLINE_S)
    await run.says("controller-0 is back after")
    assert "controller-0 died (hung: its process lived without a heartbeat for" in run.text
    run.signal(signal.SIGTERM)
    assert await run.ends() == 130
    told = await by_up(run, "controller")
    assert [event["kind"] for event in told if event["detail"].get("pid") == stopped] == ["hung", "exit"]
    assert {"restart", "back"} <= {event["kind"] for event in told}


async def test_a_service_that_cannot_come_up_says_so_once(run):
    await run.start("steps=400", fault="dcs-0-crashes", step_s=1.0)  # longer than all tries
    await run.says("dcs-0 does not stay up (killed by SIGSEGV)")
    tries = len(await by_up(run, "dcs"))

    async def tried_again() -> bool:
        return len(await by_up(run, "dcs")) >= tries + 4

    await until(tried_again, "it is tried again and again", DEADLINE_S)
    assert run.text.count("does not stay up") == 1
    run.signal(signal.SIGTERM)
    assert await run.ends() == 130


async def test_who_is_asked_to_stop_is_not_started_again(run):
    await run.start("steps=400", step_s=0.25)
    await run.says("step 1/400")
    os.kill(run.replicas()["rollout-0"], signal.SIGTERM)
    await run.says("rollout-0 was asked to stop and left; that was the last rollout, and the run waits for another one")
    run.signal(signal.SIGTERM)
    assert await run.ends() == 130
    assert [event["kind"] for event in await by_up(run, "rollout")] == ["exit"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
async def test_a_broker_that_fails_is_started_again_and_the_run_goes_on(run, number):
    await run.start("steps=4000", *([HASTY] if number == signal.SIGSTOP else []), step_s=0.1)
    await run.says("step 2/4000")
    os.kill(read_address(run.workdir / "broker.json").pid, number)
    await run.says("the broker died" if number == signal.SIGKILL else "the broker lived without a word for")
    await run.says("started again on its store")
    told = run.text.count("\nstep ")
    await until(lambda: run.text.count("\nstep ") > told + 2, "updates go on", DEADLINE_S)
    run.signal(signal.SIGINT)
    assert await run.ends() == 130
    assert (run.report()["balanced"], run.report()["faults"]) == (True, [])


async def test_when_up_is_killed_its_services_die_and_the_same_command_goes_on(run):
    await run.start("steps=400", step_s=0.25)
    await run.says("step 2/400")
    services = list(run.replicas().values())
    run.signal(signal.SIGKILL)
    await run.ends()
    await until(lambda: all(map(ended, services)), "the services are gone", DEADLINE_S)
    await run.start("steps=6")
    assert await run.ends() == 0, run.text
    assert "going on with" in run.text


async def test_one_up_a_workdir(run, tmp_path):
    await run.start("steps=400", step_s=0.25)
    await run.says("step 1/400")
    second = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.e2e.up_with_fakes", str(tmp_path / "run.yaml"), stdout=PIPE, stderr=PIPE
    )
    _, errors = await asyncio.wait_for(second.communicate(), DEADLINE_S)
    assert second.returncode == 2
    assert f"another `slipstream up` (pid {run.process.pid})" in errors.decode()
    run.signal(signal.SIGINT)
    await run.ends()


async def test_replicas_that_are_wanted_come_and_those_that_are_not_leave(run):
    """The launcher's side of a scale operation; the controller is a stand-in here, so the test writes its record."""
    await run.start("steps=4000", step_s=0.1)
    await run.says("step 2")
    address = read_address(run.workdir / "broker.json")
    async with attach(address.url, "fake") as handle:
        spec = {"service": "rollout", "by": "operation", "engine_url": ""}

        def more(record: Wanted) -> Wanted:
            return replace(record, replicas={**record.replicas, "rollout-1": spec})

        def less(record: Wanted) -> Wanted:
            return replace(
                record, replicas={"reward-0": record.replicas["reward-0"]}, leaving=["rollout-0", "rollout-1"]
            )

        record = await change(handle.kv, more)
        assert list(record.replicas) == ["reward-0", "rollout-0", "rollout-1"]

        async def beats(*replicas: str) -> bool:
            return {beat.replica for beat in await handle.registry.alive("rollout")} == set(replicas)

        await until(lambda: beats("rollout-0", "rollout-1"), "the newcomer is there", DEADLINE_S)

        async def there() -> bool:
            return [(told.kind, told.gone) for told in await handle.registry.launchers()] == [("local", {})]

        await until(there, "the launcher tells of itself", DEADLINE_S)
        await change(handle.kv, less)
        await until(lambda: beats(), "both have left, also the one that the run began with", DEADLINE_S)
        messages: dict[str, str] = {}

        async def exits_are_told() -> bool:
            events = [decode(data, Event) async for data, _ in handle.queue.read("events")]
            messages.update({event.replica: event.message for event in events if event.kind == "exit"})
            return messages.keys() >= {"rollout-0", "rollout-1"}

        await until(exits_are_told, "their processes are gone", DEADLINE_S)
    assert not {"rollout-0", "rollout-1"} & run.replicas().keys()
    assert all("left" in message for message in messages.values()), messages
    run.signal(signal.SIGINT)
    assert await run.ends() == 130
