"""Drawing a group's samples from the engine: at once, or one by one where they may be long.

Drawn one by one, a sample that is finished is stored at once if its group has been under way for `rollout.keep_after_s`. If the
replica or its engine dies, whoever gets the group next takes these as they are and draws only the missing ones. They are removed
when the group is stored as a whole, and by age if nobody does that. The bound on staleness is not touched: every sample was begun
under weights of the group's `min_step` or newer. In a deterministic run only samples count that were drawn in one go under
exactly those. tests/rollout/test_draw.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from services.rollout.engines.client import EngineClient
from services.rollout.episodes import collect, generate_request
from shared import failpoints, wire
from shared.pull import Delivery
from shared.records import FinishedSample, Group, Samples
from shared.service import Context
from shared.tokenizer import Tokenizer


class Drawer:
    """Draws from one engine. `step_of` tells the step of a version."""

    def __init__(self, ctx: Context, engine: EngineClient, tokenizer: Tokenizer, step_of: Callable[[int], int]) -> None:
        self.ctx, self.engine, self.tokenizer, self.step_of = ctx, engine, tokenizer, step_of
        self.kept = 0
        """Samples that need not be drawn again."""
        self._stored: set[str] = set()
        """Groups of which finished samples lie in the stream."""

    async def draw(self, group: Group, prompt_ids: list[int], delivery: Delivery) -> Samples:
        """All samples of the group. Raises what the engine or its answers raise."""
        began, tag = time.monotonic(), f"{self.ctx.replica}-{delivery.delivered}"
        if not self._apart(group):
            request = generate_request(group, prompt_ids, self.tokenizer.eos_id, tag)
            return await self._answer(request, group.sampling.n)
        found = await self._finished(group) if delivery.delivered > 1 else {}
        missing = [index for index in range(group.sampling.n) if index not in found]
        drawing = [asyncio.create_task(self._one(group, prompt_ids, tag, index, began)) for index in missing]
        try:
            drawn = await asyncio.gather(*drawing)
        finally:
            for task in drawing:
                task.cancel()
            await asyncio.gather(*drawing, return_exceptions=True)
        me = self.ctx.replica
        mine = {i: FinishedSample(group.id, i, me, one) for i, one in zip(missing, drawn, strict=True)}
        ordered = [part for _, part in sorted((found | mine).items())]
        samples = Samples.join([part.samples for part in ordered])
        if any(part.replica != me for part in ordered):
            samples.replicas = [part.replica for part in ordered]
        return samples

    async def forget(self, group: Group) -> None:
        """The group is stored as a whole."""
        if group.id in self._stored:
            self._stored.discard(group.id)
            await self.ctx.queue.purge("partials", self.ctx.subjects.partial(group.id, "*"))

    def _apart(self, group: Group) -> bool:
        return group.sampling.n > 1 and group.sampling.max_new_tokens >= self.ctx.config.rollout.apart_from_tokens

    async def _answer(self, request: dict[str, object], samples: int) -> Samples:
        answers = await self.engine.generate(request, timeout_s=self.ctx.config.rollout.request_timeout_s)
        return collect(answers, samples, self.tokenizer, self.step_of)

    async def _one(self, group: Group, prompt_ids: list[int], tag: str, index: int, began: float) -> Samples:
        """Sample `index`, stored if the group has been taking long."""
        request = generate_request(group, prompt_ids, self.tokenizer.eos_id, tag, index)
        one = await self._answer(request, 1)
        if time.monotonic() - began >= self.ctx.config.rollout.keep_after_s:
            record = FinishedSample(group.id, index, self.ctx.replica, one)
            subject = self.ctx.subjects.partial(group.id, index)
            self._stored.add(group.id)
            await self.ctx.queue.publish(subject, record, msg_id=f"{group.id}:{index}", once=True)
            failpoints.reach("rollout.kept")
        return one

    async def _finished(self, group: Group) -> dict[int, FinishedSample]:
        """What an earlier holder of the group has stored."""
        found: dict[int, FinishedSample] = {}
        exact = self.ctx.config.deterministic and group.kind == "train"
        async for data, _ in self.ctx.queue.read("partials", subject=self.ctx.subjects.partial(group.id, "*")):
            record = wire.decode(data, FinishedSample)
            if record.index < group.sampling.n and (not exact or record.samples.drawn_under(group.min_step)):
                found[record.index] = record
        if found:
            self._stored.add(group.id)
            self.kept += len(found)
            text = f"{group.id}: {len(found)} of {group.sampling.n} samples were finished before"
            await self.ctx.events.publish("carried_on", text, group=group.id, kept=len(found))
        return found
