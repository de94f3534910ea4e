"""The autoscaler on a real broker: what it reads of a run, its decisions as events, and that a dry run does nothing."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from services.controller.scaling.autopilot import Autopilot
from services.controller.scaling.scaler import Scaler
from shared import wire
from shared.broker import EmbeddedBroker
from shared.jetstream import Connection
from shared.records import Event, Heartbeat, Metric
from shared.sections import AutoscaleConfig
from tests.controller.pipeline import open_context, run_config


@pytest.mark.parametrize("mode", ["dry_run", "on"])
async def test_a_trainer_that_waits_and_engines_that_are_full(
    broker: EmbeddedBroker, connect: Callable[..., Awaitable[Connection]], run_name: str, tmp_path: Path, mode: Any
) -> None:
    config = run_config(run_name, str(tmp_path), rollout={"max_running_groups": 4})
    ctx = await open_context(await connect(broker.url), config, "controller", "c")
    clock = [0.0]
    rules = AutoscaleConfig(mode=mode, hold_out_s=10, every_s=5, max_replicas=3)
    pilot = Autopilot(Scaler(ctx), rules, lambda: clock[0])
    waited = 0.0

    async def turn(running: int) -> None:
        nonlocal waited
        clock[0] += 5.0
        waited += 2.5
        now = time.time()
        await ctx.registry.beat(Heartbeat("rollout", "r0", "sampling", 0, 1, 1, {"running": running}, "h", 1, now, now))
        await ctx.registry.beat(Heartbeat("trainer", "t0", "training", 0, 1, 1, {}, "h", 1, now, now))
        values = {"wait_s.groups": waited, "staleness_mean": 0.25}
        metric = Metric("trainer", "t0", 1, values, clock[0])
        await ctx.queue.publish(ctx.subjects.metrics("trainer", "t0"), metric)
        await pilot.turn()

    await turn(4)
    assert pilot.verdict.why == "not enough is known"
    for _ in range(3):
        await turn(4)
    assert pilot.load is not None
    assert (pilot.load.idle, pilot.load.busy, pilot.load.slack, pilot.load.replicas) == (0.5, 1.0, 0.75, 1)
    (decided,) = pilot.history
    assert (decided.replicas, decided.target, decided.done) == (1, 2, mode == "on")
    events = [wire.decode(data, Event) async for data, _ in ctx.queue.read("events")]
    (told,) = [event for event in events if event.kind == "autoscale"]
    assert told.message.startswith("dry run: rollout 1 -> 2" if mode == "dry_run" else "rollout 1 -> 2")
    made = list(pilot.scaler.operations.values())
    assert [one.target for one in made] == ([2] if mode == "on" else [])
    if mode == "on":
        await turn(4)
        assert pilot.verdict.why == "an operation goes on"
