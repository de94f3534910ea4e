"""Models beside the policy, on the real system: killed stages lose nothing, and a critic outlives its trainer."""

from __future__ import annotations

import json
from typing import Any

from services.controller.attach import Run
from shared import wire
from shared.metric_names import find
from shared.records import Event, Metric
from tests.e2e.test_run import DEADLINE_S, GROUPS, Example, example, kill, left_by, until_trained  # noqa: F401 - a fixture
from tests.shared.runs import until

SHORT = ("trainer.warm_start.steps=40", "eval.prompts=null", "trainer.checkpoint.every=4")


async def finished(example: Example, up: Any) -> dict[str, Any]:  # noqa: F811
    await until(lambda: up.returncode is not None, "the run ends", DEADLINE_S)
    assert up.returncode == 0, (example.folder / "output.txt").read_text()[-4000:]
    report = json.loads(example.report.read_text())
    assert report["balanced"], report["faults"]
    assert report["faults"] == []
    assert report["staleness_max"] <= 1
    return report


async def events(run: Run, service: str) -> list[Event]:
    found = [wire.decode(data, Event) async for data, _ in run.queue.read("events")]
    return [event for event in found if event.service == service]


async def test_a_teacher_and_a_reference_are_killed_and_no_group_is_lost(example: Example) -> None:  # noqa: F811
    up = await example.up(
        *SHORT,
        "steps=16",
        "algorithm={name: grpo, kl: {coef: 0.01}, distill: {coef: 0.1}}",
        "reference={refresh_every: 5}",
        f"teacher={{path: {example.folder}/model}}",
    )
    async with example.attached() as run:
        for number, replica in enumerate(("teacher-0", "reference-0"), start=1):
            await until_trained(run, 4 * number * GROUPS)
            await kill(run, replica)
        report = await finished(example, up)
    async with left_by(example) as run:
        for service in ("teacher", "reference"):
            assert [event.kind for event in await events(run, service)].count("joined") == 2
        taken = [event.detail["step"] for event in await events(run, "reference") if event.kind == "reference"]
        assert taken, "the reference was never refreshed"
        assert all(step % 5 == 0 for step in taken)
    assert report["dropped"] == {}
    assert report["trained"] == 16 * GROUPS
    assert report["cpu_seconds"]["teacher"] > 0


async def test_ppo_goes_on_with_its_critic_after_the_trainer_was_killed(example: Example) -> None:  # noqa: F811
    up = await example.up(
        *SHORT,
        "trainer.warm_start.steps=120",
        "steps=12",
        "algorithm={name: ppo}",
        "critic={optimizer: {lr: 2.0e-3}, warmup_steps: 2}",
    )
    async with example.attached() as run:
        await until_trained(run, 6 * GROUPS)
        await kill(run, "trainer-0")
        report = await finished(example, up)
    async with left_by(example) as run:
        metrics = [wire.decode(data, Metric) async for data, _ in run.queue.read("metrics")]
    assert report["trained"] == 12 * GROUPS
    assert report["rollbacks"] == 1
    assert report["dropped"].keys() <= {"stale"}, "what the rollback made too old was drawn anew"
    seen = {one.step: one.values for one in metrics if one.step is not None and "critic_loss" in one.values}
    assert {1, 2, 3, 10} <= seen.keys()
    assert seen[1]["critic_value"] == 0.0, "before its first update"
    assert seen[10]["critic_value"] > 0.0
    assert "grad_norm" not in seen[2], "the critic's alone"
    assert all(find(one.service, name) for one in metrics for name in one.values), (
        "declare it in shared/metric_names.py"
    )
