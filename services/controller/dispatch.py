"""Issues prompt groups against credits: the controller's side of the broker.

Guarantees, whenever this process dies: a group is on record before its prompt is sent (`issued` receipts go out one after the
other, so the log never has a hole); prompts that the cursor in KV does not cover are sent again by the next controller, under
the same id, so that none is lost and a second copy does no harm. What a rollback voids is in KV before anything else is issued.
Everything it knows is the fold of the receipts; nothing here decides (see credits, evaluation, finish).
`tests/controller/test_controller.py` kills it in mid-stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from services.controller.credits import Credits, Rules, Ticket
from services.controller.evaluation import Evaluations
from services.controller.groups import eval_group, issued_receipt, train_group
from services.controller.prompts import PromptSource
from services.controller.stats import Stats
from shared import failpoints, waivers, wire
from shared.config import ConfigError, RunConfig
from shared.errors import LeaseLost, TransportError
from shared.records import Group, Receipt
from shared.service import Context, ServiceFailed
from shared.waivers import Waivers

log = logging.getLogger(__name__)

CURSOR_KEY = "cursor"


@wire.schema("cursor", 1)
@dataclass(slots=True)
class Cursor:
    """What has certainly been sent: prompts with an issue number below `sent`, and the evaluations of these steps."""

    sent: int = 0
    evaluations: list[int] = field(default_factory=list)


class Dispatcher:
    """Fold receipts with `fold`; `issue` and `evaluate` send what is due."""

    def __init__(
        self,
        ctx: Context,
        source: PromptSource,
        held_out: PromptSource | None,
        on_receipt: Callable[[Receipt], None] = lambda _: None,
    ) -> None:
        self.ctx, self.config, self.source, self.held_out = ctx, ctx.config, source, held_out
        self._on_receipt = on_receipt
        self.credits = Credits(Rules.of(ctx.config), source.size)
        self.evaluations = Evaluations(ctx.config.steps, ctx.config.eval.every, eval_size(ctx.config, held_out))
        self.stats = Stats()
        self.cursor = Cursor()
        self.stored_waivers = Waivers()
        self.last_seq = 0
        self.unreadable = 0
        self.behind = False
        """It stood still so long that another may have been active: receipts come first, then issuing."""
        self.completed = 0
        """Updates that are complete and reported."""

    async def restore(self) -> None:
        """Where the last controller was, and what it may not have sent."""
        async for message, seq in self.ctx.queue.read("receipts"):
            if not self.last_seq and seq > 1:
                raise ServiceFailed(
                    f"the receipts stream lost its first {seq - 1} messages to its size limit, so nobody knows the fate of "
                    "every group any more; raise broker.max_bytes and start a new run"
                )
            self.fold(message, seq)
        while self._full(self.completed):
            self.stats.close(self.completed)
            self.completed += 1
        self.stored_waivers = Waivers.load(await self.ctx.kv.get(waivers.KEY))
        self.credits.restored(self.stored_waivers)
        await self._store_waivers()
        await self._send_again()

    def fold(self, message: bytes, seq: int) -> int | None:
        """One receipt. The step of the evaluation that it completed, or None."""
        self.last_seq = seq
        try:
            receipt = wire.decode(message, Receipt)
        except wire.WireError as error:
            self.unreadable += 1
            log.error("receipt %d is unreadable and skipped: %s", seq, error)
            return None
        self._on_receipt(receipt)
        if self.credits.apply(receipt) or receipt.kind == "rollback":
            self.stats.apply(receipt)
        if receipt.kind == "rollback":
            self.completed = min(self.completed, receipt.step)
        return self.evaluations.apply(receipt)

    async def issue(self) -> int:
        """Send every group that the credits allow. How many."""
        await self._store_waivers()
        tickets = self.credits.plan()
        if not tickets:
            return 0
        groups = await self.ctx.compute(self._groups, tickets)
        for count, ticket in enumerate(tickets):
            if not await self._assured():
                groups = groups[:count]
                break
            receipt = issued_receipt(ticket)
            await self.ctx.queue.publish(self.ctx.subjects.receipts, receipt, msg_id=f"issued:{ticket.group_id}")
            self.credits.apply(receipt)
            failpoints.reach("controller.issued")
        await self._send(groups)
        failpoints.reach("controller.sent")
        self.cursor.sent = self.credits.ledger.next_issue
        await self._store_cursor()
        return len(groups)

    async def up_to_date(self) -> bool:
        """Whether it may issue: not while another controller may have been active whose receipts are not all folded yet, or
        whose prompts may not all be sent."""
        if await self._assured() and self.behind:
            with contextlib.suppress(TransportError):  # the broker is away; asked again in the next round
                if self.last_seq >= await self.ctx.queue.last_seq("receipts"):
                    await self._send_again()
                    self.behind = False
        return not self.behind

    async def _assured(self) -> bool:
        """Whether the lease was held without a break since this was asked last; if not, or if the broker is away: `behind`."""
        try:
            assured = await self.ctx.registry.assure(self.ctx.service)
        except LeaseLost:
            raise
        except TransportError as error:
            log.warning("nothing is issued for the moment: %s", error)
            assured = False
        self.behind = self.behind or not assured
        return assured

    async def evaluate(self) -> int | None:
        """Send the evaluation that is due. Its step."""
        mark = self.evaluations.due(self.credits.step)
        if mark is None or self.held_out is None:
            return None
        await self._send(await self.ctx.compute(self._eval_groups, self.held_out, mark))
        self.evaluations.started(mark)
        self.cursor.evaluations = list(self.evaluations.begun)
        await self._store_cursor()
        return mark

    def closed_updates(self) -> list[tuple[int, dict[str, float]]]:
        """(updates done, numbers) of every update that was completed since the last call."""
        closed = []
        while self._full(self.completed):
            values = self.stats.close(self.completed)
            self.completed += 1
            closed.append((self.completed, values))
        return closed

    def _full(self, update: int) -> bool:
        return len(self.credits.ledger.by_step.get(update, ())) >= self.config.groups_per_step

    async def _send_again(self) -> None:
        """Prompts that were issued, and perhaps not sent, by whomever."""
        if (entry := await self.ctx.kv.get(CURSOR_KEY)) is not None:
            self.cursor = wire.decode(entry[0], Cursor)
        self.evaluations.begun = list(self.cursor.evaluations)
        tickets = [
            Ticket(entry.group_id, self.credits.position_of(entry.group_id), entry.issue, entry.seat, entry.min_step)
            for entry in self.credits.ledger.pending_entries()
            if entry.issue >= self.cursor.sent
        ]
        if tickets:
            log.info("sending %d prompts again that the cursor does not cover", len(tickets))
            await self._send(await self.ctx.compute(self._groups, tickets))
        self.cursor.sent = self.credits.ledger.next_issue
        await self._store_cursor()

    async def _send(self, groups: list[Group]) -> None:
        await self.ctx.queue.publish_all([(self.ctx.subjects.prompts, group, group.id) for group in groups])

    async def _store_cursor(self) -> None:
        await self.ctx.kv.put(CURSOR_KEY, wire.encode(self.cursor))

    async def _store_waivers(self) -> None:
        current = self.credits.waivers
        if current != self.stored_waivers:
            await self.ctx.kv.put(waivers.KEY, current.dump())
            self.stored_waivers = Waivers(list(current.issues), list(current.steps))

    def _groups(self, tickets: list[Ticket]) -> list[Group]:
        return [train_group(self.config, ticket, self.source.at(ticket.position)) for ticket in tickets]

    def _eval_groups(self, held_out: PromptSource, mark: int) -> list[Group]:
        return [eval_group(self.config, mark, i, held_out.record(i)) for i in range(self.evaluations.prompts)]


def eval_size(config: RunConfig, held_out: PromptSource | None) -> int:
    """How many held-out prompts there are."""
    if held_out is None:
        return 0
    if held_out.size is None:
        raise ConfigError("eval.prompts.size: this source never ends; say how many prompts an evaluation takes")
    return held_out.size


async def open_sources(ctx: Context) -> tuple[PromptSource, PromptSource | None]:
    """The prompts of training and of evaluation, read and checked."""
    config = ctx.config
    source = await ctx.compute(PromptSource, config, config.prompts, "prompts")
    held_out = config.eval.prompts
    if held_out is None:
        return source, None
    return source, await ctx.compute(PromptSource, config, held_out, "eval.prompts")


async def follow_receipts(ctx: Context, start_seq: int, into: asyncio.Queue[tuple[bytes, int]]) -> None:
    """The live end of the receipts log, over restarts of the broker."""
    async for message, seq in ctx.queue.read("receipts", start_seq=start_seq, live=True):
        await into.put((message, seq))
