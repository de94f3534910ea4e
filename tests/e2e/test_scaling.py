"""`slipstream scale` on the whole system: more and fewer replicas in mid-run, and the controller killed in mid-operation."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from services.controller.scaling.operation import Operation
from services.controller.scaling.scaler import PREFIX
from shared import wire
from tests.e2e.test_run import DEADLINE_S, GROUPS, Example, example, heartbeat, kill, until_trained  # noqa: F401
from tests.shared.runs import until

STEPS = 5000
"""Until the test ends the run."""


async def operations(example: Example) -> list[Operation]:  # noqa: F811 - the fixture's name
    """What is on record, the newest last."""
    async with example.attached() as run:
        entries = [await run.kv.get(key) for key in await run.kv.keys() if key.startswith(PREFIX)]
    found = [wire.decode(entry[0], Operation) for entry in entries if entry is not None]
    return sorted(found, key=lambda one: one.number)


async def scale(example: Example, target: str, *, harm: bool) -> Operation:  # noqa: F811
    """`slipstream scale` to its end; with `harm` the controller is killed as soon as the operation is on record."""
    before = len(await operations(example))
    async with example.attached() as run:
        asked = await example.cli("scale", target, "--nats", run.url, "--run", run.name)

        async def on_record() -> bool:
            return len(await operations(example)) > before

        await until(on_record, f"{target} is on record", DEADLINE_S)
        if harm:
            await kill(run, "controller-0")
        await until(lambda: asked.returncode is not None, f"{target} is done", DEADLINE_S)
    assert asked.returncode == 0, Path(example.folder / "output.txt").read_text()[-4000:]
    return (await operations(example))[before]


async def test_replicas_come_and_go_while_the_run_goes_on(example: Example) -> None:  # noqa: F811
    up = await example.up(f"steps={STEPS}", "trainer.warm_start.steps=40", "eval.prompts=null", "rollout.replicas=1")
    async with example.attached() as run:
        await until_trained(run, 2 * GROUPS)
        more = await scale(example, "rollout=3", harm=True)
        assert more.status == "ACTIVE"
        assert more.staying == ["rollout-1", "rollout-2"]
        assert (await scale(example, "rollout=3", harm=False)).status == "NOOP", "asking again changes nothing"

        async def measured() -> bool:
            return (await operations(example))[0].first_trained.keys() == {"rollout-1", "rollout-2"}

        await until(measured, "both newcomers' first groups are trained", DEADLINE_S)
        less = await scale(example, "rollout=1", harm=True)
        assert less.status == "COMPLETED"
        assert sorted(less.removed) == ["rollout-1", "rollout-2"]
        assert await heartbeat(run, "rollout-1") is await heartbeat(run, "rollout-2") is None
        assert await heartbeat(run, "rollout-0") is not None
        print(f"out {more.reached}, first trained {(await operations(example))[0].first_trained}, in {less.reached}")
        up.send_signal(signal.SIGINT)
        await until(lambda: up.returncode is not None, "the run drains", DEADLINE_S)
    output = (example.folder / "output.txt").read_text()
    assert up.returncode == 130, output[-4000:]
    assert output.count("first group trained") >= 2, "the run tells how long it took"
    report = json.loads(example.report.read_text())
    assert report["balanced"], report["faults"]
    assert report["faults"] == []
    assert report["trained"] > 2 * GROUPS
    assert report["replicas"]["rollout-1"]["trained"] > 0
    assert report["replicas"]["rollout-2"]["trained"] > 0
    assert report["staleness_max"] <= 1
