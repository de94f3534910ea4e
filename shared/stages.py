"""Where a group goes between the reward service and the trainer: from stage to stage, each under the group's id, stored once.

Which stages a run has, and in which order, is `shared.columns.stages`; the shortest pipeline has none.
"""

from __future__ import annotations

from shared import columns
from shared.config import RunConfig
from shared.records import Group
from shared.transfer_queue import TransferQueue


async def hand_on(queue: TransferQueue, group: Group, run: RunConfig, after: str | None = None) -> None:
    """Store the group where whatever comes behind the stage `after` (None: the reward service) takes it from."""
    role = columns.next_stage(run, after)
    subject = queue.subjects.advantages if role is None else queue.subjects.stage(role)
    await queue.publish(subject, group, msg_id=group.id)
