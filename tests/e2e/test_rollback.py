"""`slipstream weights rollback` on a run that goes on: the trainer returns to the step, the weights are the same bytes under a
new number, and the books balance at the end."""

from __future__ import annotations

import json

from services.controller.attach import Run
from services.dcs.client import DcsClient
from shared.records import Announcement, Event
from shared.wire import decode
from tests.e2e.test_run import DEADLINE_S, Example, example, until_trained  # noqa: F401 - the fixture
from tests.shared.runs import until

STEPS, GROUPS, EVERY = 80, 8, 4


async def announced(run: Run) -> list[Announcement]:
    stream = run.queue.read("weights", subject=run.subjects.announced)
    return [decode(data, Announcement) async for data, _ in stream]


async def kinds(run: Run) -> set[str]:
    return {decode(data, Event).kind async for data, _ in run.queue.read("events")}


async def refused(run: Run) -> bool:
    return "rollback_refused" in await kinds(run)


async def test_going_back_to_an_earlier_version(example: Example) -> None:  # noqa: F811
    up = await example.up(
        f"steps={STEPS}",
        "eval.prompts=null",
        f"groups_per_step={GROUPS}",
        f"trainer.checkpoint.every={EVERY}",
        "trainer.checkpoint.keep=20",
        "trainer.warm_start.steps=20",
        "rollout.replicas=1",
    )
    async with example.attached() as run:
        place = ("--nats", run.url, "--run", run.name)
        await until_trained(run, GROUPS * (2 * EVERY + 2))
        known = {told.step: told for told in await announced(run)}
        async with DcsClient(run.kv) as dcs:
            await dcs.roll_back(known[EVERY + 1].version)
        await until(lambda: refused(run), "without a checkpoint of that step it is refused", DEADLINE_S)
        wanted = known[EVERY]
        asked = await example.cli("weights", "rollback", str(wanted.version), *place)
        assert await asked.wait() == 0, (example.folder / "output.txt").read_text()
        fresh = next(told for told in await announced(run) if told.reason == f"rollback to version {wanted.version}")
        assert (fresh.step, fresh.digest) == (EVERY, wanted.digest)
        assert fresh.version > max(told.version for told in known.values())
        assert {"rollback_asked", "rolling_back", "rollback"} <= await kinds(run)
        assert await (await example.cli("weights", *place)).wait() == 0
    assert await up.wait() == 0, (example.folder / "output.txt").read_text()
    report = json.loads(example.report.read_text())
    assert report["balanced"], report["faults"]
    assert (report["faults"], report["rollbacks"], report["trained"]) == ([], 1, STEPS * GROUPS)
    assert report["staleness_max"] <= 1
    text = (example.folder / "output.txt").read_text()
    assert f"version {fresh.version} holds the weights of version {wanted.version}, step {EVERY}" in text
    assert "verified last: rollout-0: v" in text
