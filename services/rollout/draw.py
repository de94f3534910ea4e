"""Drawing a group's samples from the engine: at once, or one by one where they may be long.

Drawn one by one, a sample that is finished is stored at once if its group has been under way for `rollout.keep_after_s`. If the
replica or its engine dies, whoever gets the group next takes these as they are and draws only the missing ones. A sample that was
interrupted (a switch of weights with `on_new_weights: abort`, somebody's abort) continues from its tokens; if this replica is
about to stop, its tokens are stored and the next replica continues. Stored samples are removed when the group is stored as a
whole, and by age if nobody does that. The bound on staleness is not touched: every sample was begun under weights of the group's
`min_step` or newer, and each token keeps its version. In a deterministic run only samples count that were drawn in one go under
exactly those, so that what is interrupted is drawn again. tests/rollout/test_draw.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.rollout.engines.client import EngineClient
from services.rollout.episodes import Aborted, EpisodeError, collect, continuation, generate_request, joined
from shared import failpoints, wire
from shared.pull import Delivery
from shared.records import FinishedSample, Group, Samples
from shared.service import Context
from shared.tokenizer import Tokenizer

AGAIN_S = 0.5
"""Until a sample that was interrupted before its first token is asked for again."""
STUCK_AFTER = 20
"""So many interruptions in a row without a new token, and the sample counts as failed."""


@dataclass(slots=True)
class Counts:
    """Of samples, since the start of this drawer."""

    kept: int = 0
    """Finished or begun by an earlier holder of their group."""
    interrupted: int = 0
    """Interruptions that samples continued from."""
    truncated: int = 0
    """Cut off at `sampling.max_new_tokens`."""
    nonfinite: int = 0
    """With a token whose log-probability is no number; the trainer leaves such tokens out."""


class Drawer:
    """Draws from one engine. `step_of` tells the step of a version."""

    def __init__(self, ctx: Context, engine: EngineClient, tokenizer: Tokenizer, step_of: Callable[[int], int]) -> None:
        self.ctx, self.engine, self.tokenizer, self.step_of = ctx, engine, tokenizer, step_of
        self.counts = Counts()
        self.stopping = False
        """What is interrupted from here on is for the next replica."""
        self._stored: set[str] = set()
        """Groups of which samples lie in the stream."""
        self._begun: set[tuple[str, int]] = set()
        """Samples of which a beginning does."""

    async def draw(self, group: Group, prompt_ids: list[int], delivery: Delivery) -> Samples:
        """All samples of the group. Raises what the engine or its answers raise."""
        began, tag = time.monotonic(), f"{self.ctx.replica}-{delivery.delivered}"
        found = await self._finished(group) if delivery.delivered > 1 else {}
        if self._apart(group) or found:
            samples = await self._one_by_one(group, prompt_ids, tag, found, began)
        else:
            samples = await self._at_once(group, prompt_ids, tag)
        self.counts.truncated += samples.finish.count("length")
        self.counts.nonfinite += int(np.unique(samples.owners[~np.isfinite(samples.logprobs)]).size)
        return samples

    async def _one_by_one(
        self, group: Group, prompt_ids: list[int], tag: str, found: dict[int, FinishedSample], began: float
    ) -> Samples:
        """One request a sample that is not there yet, or not finished."""
        done = {index: part for index, part in found.items() if part.samples.finish[0] != "abort"}
        missing = [index for index in range(group.sampling.n) if index not in done]
        drawing = [
            asyncio.create_task(self._one(group, prompt_ids, tag, index, began, found.get(index))) for index in missing
        ]
        try:
            drawn = await asyncio.gather(*drawing)
        finally:
            for task in drawing:
                task.cancel()
            await asyncio.gather(*drawing, return_exceptions=True)
        me = self.ctx.replica
        mine = {i: FinishedSample(group.id, i, me, one) for i, one in zip(missing, drawn, strict=True)}
        ordered = [part for _, part in sorted((done | mine).items())]
        samples = Samples.join([part.samples for part in ordered])
        if any(part.replica != me for part in ordered):
            samples.replicas = [part.replica for part in ordered]
        return samples

    async def _at_once(self, group: Group, prompt_ids: list[int], tag: str) -> Samples:
        """One request for all; those that are interrupted go on by themselves."""
        request = generate_request(group, prompt_ids, self.tokenizer.eos_id, tag)
        samples = await self._answer(request, group.sampling.n)
        if "abort" not in samples.finish:
            return samples
        parts = samples.split()
        going_on = [
            self._complete(group, i, request | {"rid": f"{request['rid']}/{i}"}, p) for i, p in enumerate(parts)
        ]
        ended = await asyncio.gather(*going_on, return_exceptions=True)
        for result in ended:
            if isinstance(result, BaseException):
                raise result
        return Samples.join([one for one in ended if isinstance(one, Samples)])

    async def forget(self, group: Group) -> None:
        """The group is stored as a whole."""
        if group.id in self._stored:
            self._stored.discard(group.id)
            self._begun -= {(group.id, index) for index in range(group.sampling.n)}
            await self.ctx.queue.purge("partials", self.ctx.subjects.partial(group.id, "*"))

    def _apart(self, group: Group) -> bool:
        options, sampling = self.ctx.config.rollout, group.sampling
        return sampling.n > 1 and sampling.max_new_tokens >= options.apart_from_tokens

    async def _answer(self, request: dict[str, Any], samples: int) -> Samples:
        answers = await self.engine.generate(request, timeout_s=self.ctx.config.rollout.request_timeout_s)
        return collect(answers, samples, self.tokenizer, self.step_of)

    async def _one(
        self, group: Group, prompt_ids: list[int], tag: str, index: int, began: float, begun: FinishedSample | None
    ) -> Samples:
        """Sample `index`, stored if the group has been taking long. `begun`: what an earlier holder has of it."""
        request = generate_request(group, prompt_ids, self.tokenizer.eos_id, tag, index)
        part = begun.samples if begun is not None else await self._answer(request, 1)
        one = await self._complete(group, index, request, part)
        if time.monotonic() - began >= self.ctx.config.rollout.keep_after_s:
            await self._store(group, index, one)
            failpoints.reach("rollout.kept")
        return one

    async def _complete(self, group: Group, index: int, request: dict[str, Any], part: Samples) -> Samples:
        """Continue a sample from its tokens until it is finished. Raises Aborted where that is not for this replica to do,
        EpisodeError where it gets no further."""
        attempt = stuck = 0
        while part.finish[0] == "abort":
            if self.ctx.config.deterministic and group.kind == "train":
                raise Aborted(f"sample {index} was interrupted, and a deterministic run draws it in one go")
            if self.stopping:
                if len(part.ids):
                    await self._store(group, index, part)
                raise Aborted(f"sample {index} is left to the next replica, {len(part.ids)} tokens are drawn")
            attempt += 1
            self.counts.interrupted += 1
            before = len(part.ids)
            rest = await self._answer(continuation(request, part, attempt), 1)
            part = joined(part, rest, self.tokenizer)
            stuck = stuck + 1 if len(part.ids) == before else 0
            if stuck == STUCK_AFTER:
                raise EpisodeError(f"sample {index} was interrupted {stuck} times in a row without a new token")
            if stuck:
                await asyncio.sleep(AGAIN_S)
        return part

    async def _store(self, group: Group, index: int, one: Samples) -> None:
        """For whoever gets the group next; a finished one stays, an interrupted one may be replaced by what continues it."""
        record = FinishedSample(group.id, index, self.ctx.replica, one)
        self._stored.add(group.id)
        begun = one.finish[0] == "abort"
        msg_id = f"{group.id}:{index}" + (f":{len(one.ids)}" if begun else "")
        once = not begun and (group.id, index) not in self._begun
        if begun:
            self._begun.add((group.id, index))
        await self.ctx.queue.publish(self.ctx.subjects.partial(group.id, index), record, msg_id=msg_id, once=once)

    async def _finished(self, group: Group) -> dict[int, FinishedSample]:
        """What an earlier holder of the group has stored."""
        found: dict[int, FinishedSample] = {}
        exact = self.ctx.config.deterministic and group.kind == "train"
        async for data, _ in self.ctx.queue.read("partials", subject=self.ctx.subjects.partial(group.id, "*")):
            if data is wire.UNFIT:
                continue
            record = wire.decode(data, FinishedSample)
            if record.index < group.sampling.n and (not exact or record.samples.drawn_under(group.min_step)):
                found[record.index] = record
        if found:
            self._stored.add(group.id)
            begun = {index for index, part in found.items() if part.samples.finish[0] == "abort"}
            self._begun |= {(group.id, index) for index in begun}
            self.counts.kept += len(found)
            text = f"{group.id}: {len(found) - len(begun)} of {group.sampling.n} samples were finished before"
            text += f", {len(begun)} begun" if begun else ""
            await self.ctx.events.publish("carried_on", text, group=group.id, kept=len(found), begun=len(begun))
        return found
