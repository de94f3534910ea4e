"""Named points at which a test has this process die, as if it had been killed just there. Off unless asked for.

    SLIPSTREAM_FAILPOINT=checkpoint.written:2      SIGKILL when the second checkpoint's files are written, but not yet named

`reach(name)` stands between two effects that must not depend on each other's survival: a publish and an ack, a checkpoint and
what it covers. Without the variable it compares one module attribute with None. Which points there are: `POINTS`; the tests kill
at every one of them (tests/chaos/test_determinism.py) and refuse a name that is not listed.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

VARIABLE = "SLIPSTREAM_FAILPOINT"

POINTS = {
    "trainer.updated": "weights changed; no receipt, nothing published",
    "trainer.receipts": "receipts are out, the weights may not be copied",
    "trainer.told": "receipts are out and the weights are copied",
    "weights.snapshot": "the snapshot of a version is complete, but not announced",
    "weights.announced": "announced, not sent",
    "weights.sent": "sent, the DCS does not know it",
    "checkpoint.begun": "nothing of the checkpoint is written",
    "checkpoint.writing": "a tensor of it is written, others are not",
    "checkpoint.written": "its files are written, but it has no name yet",
    "checkpoint.named": "it is durable; the older ones are still there",
    "checkpoint.purging": "an older one is half removed",
    "trainer.saved": "the checkpoint is durable, nothing acknowledged",
    "trainer.acked": "some of what it covers is acknowledged",
    "trainer.covered": "all of it is",
    "trainer.taken": "the queue is taken over and the receipts are read; no rollback is on record",
    "trainer.rolled_back": "the rollback is on record, the receipts that its checkpoint holds are not",
    "rollout.kept": "some finished samples of a group are stored, others are still being drawn",
    "rollout.sampled": "all samples are there, the group is not stored",
    "rollout.stored": "the group is stored as a reward request, its prompt not acknowledged",
    "rollout.acked": "acknowledged, its finished samples are still stored",
    "rollout.switched": "new weights are served, the DCS does not know it",
    "reward.scored": "scored, not stored",
    "reward.stored": "stored as a trajectory, the request not acknowledged",
    "advantages.begun": "the trajectory is read, nothing is made of it",
    "advantages.stored": "stored for the trainer (or dropped), the trajectory not acknowledged",
    "controller.issued": "some groups are on record as issued, no prompt is sent",
    "controller.sent": "the prompts are sent, the cursor is not stored",
    "controller.over": "the run is over, which is not on record",
    "dcs.allocated": "a version has its number, the publisher does not know it",
    "dcs.decided": "an announcement is decided, but not published",
    "dcs.announced": "published, the publisher does not know it",
    "dcs.purging": "old snapshots are not yet removed",
}
"""Name -> what is true when a process dies there."""

TURN_POINTS = {
    "trainer.complete": "all groups of the update are there, the device is not asked for",
    "trainer.asked": "asked for, the engines may be awake",
    "trainer.awake": "the device is the trainer's, nothing is computed",
    "trainer.asleep": "the new weights are announced, the device is not given",
    "trainer.gave": "given; no engine may have taken the weights",
    "rollout.entered": "at the table, but not started or woken",
    "rollout.idle": "nothing runs, the engine has its memory",
    "rollout.asleep": "the engine sleeps, the table says that it is awake",
    "rollout.slept": "the table knows it",
    "rollout.took": "the new weights are served, and the table knows it",
}
"""Likewise, on a device that trainer and engines share (tests/chaos/test_colocate.py)."""


@dataclass(slots=True)
class _Armed:
    name: str
    left: int


_armed: _Armed | None = None


def arm(text: str | None) -> None:
    """`name` or `name:count`: die when `name` is reached for the `count`-th time. None: off. ValueError: no such point."""
    global _armed
    if not text:
        _armed = None
        return
    name, _, count = text.partition(":")
    if name not in POINTS | TURN_POINTS or not (count or "1").isdigit():
        raise ValueError(f"{VARIABLE}={text}: expected name:count with one of {', '.join(POINTS | TURN_POINTS)}")
    _armed = _Armed(name, int(count or 1))


def reach(name: str) -> None:
    """This process is at `name` now."""
    if _armed is None or _armed.name != name:
        return
    _armed.left -= 1
    if _armed.left == 0:
        os.kill(os.getpid(), signal.SIGKILL)


arm(os.environ.get(VARIABLE))
