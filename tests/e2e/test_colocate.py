"""`slipstream up` with trainer and engines on one device: trainer, engine, rollout and DCS are killed in the trainer's turn.

The run has no end of its own: it is stopped when it has got over the last kill, so that nothing depends on how fast it is. Every
point of the handshake, and the same weights bit for bit: tests/chaos/test_colocate.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.dcs import segments
from shared.turn_table import TurnTable
from tests.chaos.system import DEADLINE_S, System
from tests.shared.runs import until

GROUPS = 4


async def test_a_run_on_one_device_whose_processes_are_killed_in_turn(tmp_path: Path) -> None:
    sets = (
        "placement=colocate",
        "max_staleness=0",
        "steps=100000",
        f"groups_per_step={GROUPS}",
        "samples_per_group=4",
        "eval.prompts=null",
        "trainer.warm_start.steps=40",
        "trainer.checkpoint.every=2",
        "redeliver_after_s=2",
        f"model.path={tmp_path}/model",
    )
    async with System(tmp_path, *sets) as system:
        async with system.attached() as run:
            table = TurnTable(run.kv, asyncio.sleep)

            async def in_its_turn() -> bool:
                return (await table.read()).holder == "trainer"

            await system.trains(run, 2 * GROUPS)
            for part in ("trainer-0", "engine", "rollout-1", "dcs-0"):
                await until(in_its_turn, "the trainer's turn", DEADLINE_S)
                assert await system.kill(part) is not None
                await system.trains(run, 3 * GROUPS)
        report = await system.stops()
    assert report["faults"] == []
    assert report["balanced"]
    assert report["staleness_max"] == 0
    assert report["rollbacks"] == 1
    assert report["turns"]["trainer"]["sleeps"] > 0
    assert report["turns"]["rollout"]["wakes"] > 0
    assert any(holder["how"] == "shared" for version in report["versions"] for holder in version["holders"].values())
    prefix = segments.prefix("sort-letters", str(system.workdir))
    assert list(segments.FOLDER.glob(f"{prefix}*")) == []
