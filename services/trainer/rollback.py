"""A trainer that goes on from a checkpoint puts on record that whatever came after it is undone.

One `rollback` receipt does everything, so that a crash cannot leave half of it: it reopens the groups of undone updates, it
fences what a replaced trainer may still write (shared/ledger.py), and it drops the groups whose samples are gone for good: those
that a checkpoint covered which is damaged now. Their messages were acknowledged, so they will not come again; the controller
issues their prompts anew. `tests/trainer/test_intake.py`, `tests/chaos/test_protocol.py`.
"""

from __future__ import annotations

import time
from typing import Any

from services.trainer.intake import Intake, Rollback
from services.trainer.start import Start
from shared import failpoints
from shared.ledger import Ledger
from shared.records import Receipt
from shared.service import Context, ServiceFailed


async def roll_back(ctx: Context, start: Start, intake: Intake, version: int) -> None:
    """Write the receipt, and those of the checkpoint that may not have been written. `version`: the first of the new history;
    `intake` has taken the queue over and read all receipts so far."""
    ledger = intake.ledger
    if not start.resumed:
        if ledger.trained:
            raise ServiceFailed(
                f"the receipts say that {ledger.trained} groups are trained, but there is no checkpoint of it below "
                f"{ctx.config.work_path}: put the checkpoints back, or start a new run under another name"
            )
        return
    lost = lost_groups(ledger, start)
    if lost and ctx.config.deterministic:
        raise ServiceFailed(
            f"the checkpoint of step {start.damaged_step} is damaged and the {len(lost)} groups that only it covers are "
            "acknowledged, so the same weights cannot be reached again. Put a whole copy of it back, or give the promise up and "
            "go on from the one before: --set deterministic=false"
        )
    detail: dict[str, Any] = {"epoch": start.epoch, "version": version, "lost": lost, "damaged": start.damaged_sequence}
    if ctx.config.deterministic:
        detail["repeats"] = True
    receipt = Receipt("rollback", step=start.step, detail=detail, replica=ctx.replica, at=time.time())
    await ctx.queue.publish(ctx.subjects.receipts, receipt, msg_id=f"rollback:{version}")
    failpoints.reach("trainer.rolled_back")
    if not ctx.config.deterministic:
        start.rollbacks.append(Rollback(version, start.step))
    for group_id in lost:
        start.window.drop(ledger.entries[group_id].issue)
    await intake.write(start.untold)
    await ctx.events.publish("rollback", f"to step {start.step}", step=start.step, version=version, lost=len(lost))


def lost_groups(ledger: Ledger, start: Start) -> list[str]:
    """Trained groups that only a damaged checkpoint covers, unless an earlier rollback dropped them already."""
    if start.damaged_sequence <= ledger.damaged:
        return []
    return [id_ for step in range(start.step, start.damaged_step) for id_ in ledger.by_step.get(step, [])]
