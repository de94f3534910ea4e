"""A scoring stage between reward and trainer: `slipstream serve teacher` and `slipstream serve reference`.

    pull a group -> an engine on the role's model scores its tokens -> add the columns -> hand on -> ack

Guarantees: as those of the reward service's stages: a group is acknowledged only after it is stored with its columns behind this
stage, under its own id, so that doing it twice leaves one; what cannot be scored is an event and counted, is tried again, and
after `rollout.max_deliveries` tries becomes a dead letter and a drop `dead:<role>`: no group passes without its columns. If the
engine dies, another one is started. A model with another vocabulary than the policy's is refused at the start.

The reference is `reference.path` or what the trainer wrote (services/trainer/references.py), taken anew when it is refreshed.
`tests/rollout/test_stage.py`, `tests/e2e/test_stages.py`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

from services.rollout.engines.client import EngineClient, EngineDead, EngineError
from services.rollout.engines.process import EngineProcess, EngineStartError, vocabulary
from services.rollout.scores import ScoreError, score_columns, score_request
from services.trainer import references
from services.trainer.model_folder import ModelFolderError, check_same_vocabulary
from shared import failpoints, wire
from shared.config import ConfigError
from shared.errors import AckTimeout
from shared.pull import Delivery, Puller
from shared.records import Group
from shared.service import Context, ServiceFailed
from shared.stages import hand_on

log = logging.getLogger(__name__)

POLL_S = 1.0
METRICS_S = 2.0
BACK_OFF_S = (1.0, 2.0, 5.0, 15.0)
TASKS = 8
"""Groups that are scored at once: the engine batches them."""

Role = Literal["teacher", "reference"]


async def main(ctx: Context) -> None:
    """Score with one engine after another until told to stop."""
    stage = Stage(ctx, "teacher" if ctx.service == "teacher" else "reference")
    while not ctx.stopping.is_set():
        try:
            await stage.with_engine()
        except EngineStartError as error:
            raise ServiceFailed(str(error)) from error
        except ModelFolderError as error:
            raise ConfigError(f"{stage.role}.path: {error}") from error
        except EngineDead as error:
            await ctx.events.publish("engine_died", str(error))
            await ctx.sleep(BACK_OFF_S[min(stage.deaths, len(BACK_OFF_S) - 1)])
            stage.deaths += 1


class Stage:
    """One role's stage, in this process."""

    def __init__(self, ctx: Context, role: Role) -> None:
        self.ctx, self.config, self.role = ctx, ctx.config, role
        self.top_k = ctx.config.teacher.top_k if role == "teacher" and ctx.config.teacher is not None else 0
        self.step = -1
        """The reference's; of a teacher always 0."""
        self.deaths = self.groups = self.tokens = self.failures = self.running = 0
        self._emitted = 0.0
        self._loading = asyncio.Lock()

    async def with_engine(self) -> None:
        """Until told to stop, or the engine dies."""
        ctx = self.ctx
        if (found := await self._model()) is None:
            return
        self.step, folder = found
        check_same_vocabulary(self.config.path(self.config.model.path), folder)
        await ctx.beat("starting engine")
        async with AsyncExitStack() as stack:
            process = await ctx.vouch(EngineProcess.start_for(self.config, folder, weight_version=str(self.step)))
            stack.push_async_callback(process.stop)
            self.engine = await stack.enter_async_context(EngineClient(process.url, vocab=vocabulary(folder)))
            await ctx.events.publish("joined", f"scoring with {folder}", step=self.step)
            await self.run()

    async def run(self) -> None:
        puller = await self.ctx.queue.pull(
            self.role,
            self.role,
            prefetch=TASKS,
            max_deliveries=self.config.rollout.max_deliveries,
            ack_wait_s=self.config.redeliver_after_s,
        )
        tasks = [asyncio.create_task(self._loop(puller)) for _ in range(TASKS)]
        stop = asyncio.create_task(self.ctx.stopping.wait())
        try:
            await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            if self.ctx.stopping.is_set():
                await puller.set_prefetch(0)
                await asyncio.wait(tasks, timeout=self.config.drain_timeout_s)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            stop.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(stop, *tasks, return_exceptions=True)
            await puller.stop()
            self._emit()

    async def _model(self) -> tuple[int, Path] | None:
        """(step, folder) of the role's model; waits for the trainer to write it. None: the service is to stop."""
        if self.role == "teacher":
            assert self.config.teacher is not None
            return 0, self.config.path(self.config.teacher.path)
        while (found := references.newest(self.config)) is None:
            await self.ctx.beat("waiting for weights")
            await self.ctx.sleep(POLL_S)
            if self.ctx.stopping.is_set():
                return None
        return found

    async def _loop(self, puller: Puller) -> None:
        """Groups one by one."""
        while not self.ctx.stopping.is_set():
            await self._beat()
            with self.ctx.metrics.wait("groups"):
                delivery = await self.ctx.stop_or(puller.next(POLL_S))
            if delivery is not None:
                self.running += 1
                try:
                    await self._take(delivery)
                finally:
                    self.running -= 1

    async def _take(self, delivery: Delivery) -> None:
        """One group, from the queue to the next one."""
        try:
            group = wire.decode(delivery.data, Group)
        except wire.WireError as error:
            await self.ctx.queue.bury(delivery, self.role, str(error))
            return
        try:
            await self.ctx.vouch(self._score(group))
        except EngineDead:
            await delivery.nak()
            raise
        except (EngineError, ScoreError) as error:
            self.failures += 1
            await self.ctx.events.publish(
                "scoring_failed",
                f"{group.id}: {error}",
                group=group.id,
                delivery=delivery.delivered,
                so_far=self.failures,
            )
            await delivery.nak(1.0)
            return
        except BaseException:
            await delivery.nak()
            raise
        try:
            await delivery.ack()
        except AckTimeout as error:  # it comes again, and what it becomes is stored already
            log.warning("%s", error)
            delivery.release()

    async def _score(self, group: Group) -> None:
        await self._refresh()
        request = score_request(group, self.top_k, f"{self.ctx.replica}-{group.id}")
        timeout_s = self.config.rollout.request_timeout_s
        with self.ctx.metrics.busy():
            answers = await self.engine.generate(request, timeout_s=timeout_s) if request is not None else []
        columns, id_columns = score_columns(group, answers, self.role, self.top_k)
        group.columns |= columns
        group.id_columns |= id_columns
        group.times[self.role] = time.time()
        failpoints.reach(f"{self.role}.scored")
        await hand_on(self.ctx.queue, group, self.config, after=self.role)
        failpoints.reach(f"{self.role}.stored")
        self.groups += 1
        self.tokens += len(columns[f"{self.role}_logprobs"])

    async def _refresh(self) -> None:
        """Take over a newer reference, if there is one. Scores under way see the switch between two of the engine's steps."""
        if self.role == "teacher":
            return
        async with self._loading:
            found = references.newest(self.config)
            if found is not None and found[0] != self.step:
                await self.engine.update_from_disk(str(found[1]), weight_version=str(found[0]))
                self.step = found[0]
                await self.ctx.events.publish(
                    "reference", f"is the policy of step {self.step} from here on", step=self.step
                )

    async def _beat(self) -> None:
        await self.ctx.beat("scoring" if self.running else "idle", progress=self.groups, step=self.step)
        if time.monotonic() - self._emitted > METRICS_S:
            self._emitted = time.monotonic()
            self._emit()

    def _emit(self) -> None:
        self.ctx.metrics.emit(
            groups_total=self.groups,
            tokens_total=self.tokens,
            failures_total=self.failures,
            engine_deaths_total=self.deaths,
            running=self.running,
        )
