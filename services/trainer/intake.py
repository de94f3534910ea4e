"""Which groups go into which update: the trainer's end of the advantages queue.

Guarantees: every group is handed out at most once in a history of the weights, in the order of issue inside the window; what
the checkpoint holds is acknowledged and skipped when it comes again; a group that breaks the staleness bound is dropped with
reason `stale`, whatever let it get here; a message is acknowledged only by `covered`, after a checkpoint that holds its update,
or once its drop is on record. Drops by others are learnt from the receipts, so that nobody waits for a group that will not come;
all that were written before this trainer began are known before it takes the first group, so none gets a second fate.
`tests/trainer/test_intake.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace

import numpy as np

from services.trainer.window import Window
from shared import columns, failpoints, wire
from shared.ledger import Ledger
from shared.pull import Delivery, Puller
from shared.records import Group, Receipt
from shared.service import Context, ServiceFailed

log = logging.getLogger(__name__)

POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Rollback:
    """The trainer went back to the weights of `step`; versions below `version` that hold later steps are of a lost history."""

    version: int
    step: int


def sample_steps(group: Group, rollbacks: list[Rollback]) -> np.ndarray:
    """[G] the step of the oldest weights of each sample (-1: no token), counted in today's history: weights of a lost history
    count from the last step that both share."""
    assert group.samples is not None
    samples = group.samples
    steps = samples.span_step.copy()
    for rollback in rollbacks:
        lost = samples.span_version < rollback.version
        steps[lost] = np.minimum(steps[lost], rollback.step)
    return samples.oldest(steps)


def oldest_step(group: Group, rollbacks: list[Rollback]) -> int | None:
    """Of all tokens of the group; None if it has none."""
    steps = sample_steps(group, rollbacks)
    return min((int(step) for step in steps if step >= 0), default=None)


class Intake:
    """Hands out groups, update by update."""

    def __init__(self, ctx: Context, window: Window[Group], rollbacks: list[Rollback], epoch: int) -> None:
        self.ctx, self.window, self.rollbacks = ctx, window, rollbacks
        self.epoch = epoch
        self.ledger = Ledger()
        self._held: dict[str, Delivery] = {}
        self._puller: Puller | None = None
        self._news = asyncio.Event()
        self._folded = 0
        self._following: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Take over the queue: whatever is not acknowledged is delivered anew, and an older trainer is fenced off. Only then
        are the receipts read, and only then may a rollback be written: an older trainer can acknowledge no more by then."""
        self._puller = await self.ctx.queue.pull(
            "advantages", "trainer", prefetch=self.ctx.config.slots, recreate=True, max_deliveries=None
        )
        async for message, seq in self.ctx.queue.read("receipts"):
            self._fold(message, seq)

    def follow(self) -> None:
        """Go on with the receipts as they come."""
        self._following = asyncio.create_task(self._follow_receipts())

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        if self._puller is not None:
            await self._puller.stop()

    async def take(self, step: int) -> Group | None:
        """The next group for update `step`, or None when the service is to stop."""
        while not self.ctx.stopping.is_set():
            for _, group in self.window.take(limit=1):
                oldest = oldest_step(group, self.rollbacks)
                if oldest is None or step - oldest <= self.ctx.config.max_staleness:
                    return group
                await self._drop_stale(group, step)
            await self._receive()
        return None

    async def until_settled(self, issue: int) -> bool:
        """Wait until every group with a lower issue number is here or has its fate. False when the service is to stop."""
        while not self.window.settled_below(issue):
            if self.ctx.stopping.is_set():
                return False
            await self.ctx.beat("waiting for groups")
            await self._receive()
        return True

    async def write(self, receipts: list[Receipt]) -> None:
        """Put `trained` receipts on record, as this trainer's."""
        subject = self.ctx.subjects.receipts
        mine = [replace(one, detail={"epoch": self.epoch}) for one in receipts]
        await self.ctx.queue.publish_all([(subject, one, f"trained:{one.group_id}:{self.epoch}") for one in mine])
        failpoints.reach("trainer.receipts")

    async def covered(self, group_ids: list[str]) -> None:
        """A durable checkpoint holds these groups: acknowledge their messages."""
        deliveries = [self._held.pop(group_id) for group_id in group_ids if group_id in self._held]
        await asyncio.gather(*(_acknowledge(delivery) for delivery in deliveries))

    async def _receive(self) -> None:
        """One more message into the window, or the news of a drop, or nothing for a moment."""
        if self._following is not None and self._following.done():
            self._following.result()
        await self.ctx.beat("waiting for groups")
        with self.ctx.metrics.wait("groups"):
            await self._next()

    async def _next(self) -> None:
        assert self._puller is not None
        self._news.clear()
        arriving = asyncio.ensure_future(self._puller.next(POLL_S))
        news = asyncio.ensure_future(self._news.wait())
        try:
            await self.ctx.stop_or(asyncio.wait({arriving, news}, return_when=asyncio.FIRST_COMPLETED), POLL_S)
            if not arriving.done():
                return
            delivery = arriving.result()
        finally:
            news.cancel()
            arriving.cancel()
        if delivery is not None:
            await self._take_in(delivery)

    async def _take_in(self, delivery: Delivery) -> None:
        try:
            group = wire.decode(delivery.data, Group)
            if group.samples is None or group.advantages is None or group.prompt_ids is None:
                raise wire.WireError(f"{group.id}: no samples, advantages or prompt_ids")
            if problem := columns.missing(group, columns.travelling(self.ctx.config)):
                raise wire.WireError(problem)
        except wire.WireError as error:
            await self.ctx.queue.bury(delivery, "trainer", str(error))
            return
        if self.ledger.fate(group.id) == "dropped" or not self.window.offer(group.issue, group):
            log.info("%s has its fate already: acknowledged and skipped", group.id)
            await delivery.ack()
            return
        self._held[group.id] = delivery

    async def _drop_stale(self, group: Group, step: int) -> None:
        """Acknowledged only when the receipt comes back from the log and counts: that of a replaced trainer does not."""
        ctx = self.ctx
        await ctx.events.publish(
            "dropped",
            f"{group.id}: stale in update {step}",
            group=group.id,
            reason="stale",
            oldest=oldest_step(group, self.rollbacks),
            step=step,
        )
        receipt = Receipt(
            "dropped",
            group.id,
            issue=group.issue,
            seat=group.seat,
            min_step=group.min_step,
            step=step,
            reason="stale",
            replica=group.replica,
            sample_steps=sample_steps(group, self.rollbacks),
            detail={"epoch": self.epoch},
            at=time.time(),
        )
        await ctx.queue.publish(ctx.subjects.receipts, receipt, msg_id=f"dropped:{group.id}:{self.epoch}")

    async def _follow_receipts(self) -> None:
        async for message, seq in self.ctx.queue.read("receipts", start_seq=self._folded + 1, live=True):
            if dropped := self._fold(message, seq):
                await self.covered(dropped)
                self._news.set()

    def _fold(self, message: bytes, seq: int) -> list[str]:
        """One receipt. Which groups it dropped, whoever did it."""
        self._folded = seq
        try:
            receipt = wire.decode(message, Receipt)
        except wire.WireError as error:
            log.error("receipt %d is unreadable and skipped: %s", seq, error)
            return []
        changed = self.ledger.apply(receipt)
        if self.ledger.epoch > self.epoch:
            raise ServiceFailed(f"another trainer ({receipt.replica}) has taken over; this one must stop")
        if not changed:
            return []
        dropped = []
        for group_id in (receipt.group_id, *receipt.detail.get("lost", ())):
            entry = self.ledger.entries.get(group_id)
            if entry is not None and entry.issued and entry.fate == "dropped":
                self.window.drop(entry.issue)
                dropped.append(group_id)
        return dropped


async def _acknowledge(delivery: Delivery) -> None:
    await delivery.ack()
    failpoints.reach("trainer.acked")
