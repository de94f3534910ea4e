"""The reward service: two stages, each a durable consumer that any number of replicas share.

    rewards.requests -> score in the pool -> trajectories
    trajectories -> evaluated | filter -> dropped, or advantages -> advantages (by way of the stages that the algorithm needs)

Guarantees: a message is acknowledged only after what it became is stored; everything is published under the group's id, so that
doing it twice leaves one result; a message that cannot be read goes to the dead letters and its group is dropped; told to stop,
the service finishes what it holds within `drain_timeout_s` and gives the rest back. tests/reward/test_service.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from services.reward.advantages import group_advantages, shaped_rewards
from services.reward.filters import drop_reason
from services.reward.pool import Job, Pool
from services.reward.scoring import FunctionError, Outcome
from services.reward.totals import combine, kinds, names_of
from shared import failpoints, wire
from shared.config import ConfigError
from shared.errors import AckTimeout, TransportError
from shared.pull import Delivery, Puller
from shared.records import Group, Receipt
from shared.service import Context
from shared.stages import hand_on

log = logging.getLogger(__name__)

POLL_S = 1.0
METRICS_S = 2.0
ADVANTAGE_TASKS = 4
"""Groups of the second stage that are on their way at once: each is two round trips to the broker and next to no work."""

Handler = Callable[[Group], Awaitable[None]]


async def main(ctx: Context) -> None:
    """Score and pass on until told to stop."""
    names = names_of(ctx.config.reward)
    try:
        async with AsyncExitStack() as stack:
            pool = await ctx.vouch(stack.enter_async_context(Pool(ctx.config)))
            await Reward(ctx, pool, names).run()
    except FunctionError as error:
        raise ConfigError(str(error)) from error


class Reward:
    """Both stages."""

    def __init__(self, ctx: Context, pool: Pool, names: list[str]) -> None:
        self.ctx, self.config, self.pool, self.names = ctx, ctx.config, pool, names
        self.errors: Counter[str] = Counter()
        self.groups = self.samples = self.passed = self.scoring = 0
        self.dropped: Counter[str] = Counter()
        self.emitted = 0.0

    async def run(self) -> None:
        tries, wait_s, pull = self.config.reward.max_deliveries, self.config.redeliver_after_s, self.ctx.queue.pull
        requests = await pull("rewards", "reward", prefetch=self.pool.size, max_deliveries=tries, ack_wait_s=wait_s)
        trajectories = await pull(
            "trajectories", "advantages", prefetch=2 * ADVANTAGE_TASKS, max_deliveries=tries, ack_wait_s=wait_s
        )
        loops = [
            *(self._loop(requests, "reward", self.score) for _ in range(self.pool.size)),
            *(self._loop(trajectories, "advantages", self.pass_on) for _ in range(ADVANTAGE_TASKS)),
        ]
        running = [asyncio.create_task(loop) for loop in loops]
        try:
            await self._until_drained(running, [requests, trajectories])
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for puller in (requests, trajectories):
                await puller.stop()
        self._emit()

    async def _loop(self, puller: Puller, stage: str, handle: Handler) -> None:
        """Messages one by one."""
        while not self.ctx.stopping.is_set():
            await self._beat()
            with self.ctx.metrics.wait(stage):
                delivery = await self.ctx.stop_or(puller.next(POLL_S))
            if delivery is not None:
                await self._take(delivery, stage, handle)

    async def _take(self, delivery: Delivery, stage: str, handle: Handler) -> None:
        try:
            group = read(delivery.data, scored=stage == "advantages")
        except wire.WireError as error:
            await self.ctx.queue.bury(delivery, stage, str(error))
            return
        try:
            await self.ctx.vouch(handle(group))
        except (asyncio.CancelledError, FunctionError, TransportError):
            await delivery.nak()
            raise
        except Exception as error:  # whatever a group does costs that group a delivery, and not the replica
            text = f"{group.id}: {stage}: {type(error).__name__}: {error}"
            log.exception("%s", text)
            await self.ctx.events.publish("group_failed", text, group=group.id, delivery=delivery.delivered)
            await delivery.nak(1.0)
            return
        try:
            await delivery.ack()
        except AckTimeout as error:  # it comes again, and what it becomes is stored already
            log.warning("%s", error)
            delivery.release()

    async def _until_drained(self, running: list[asyncio.Task[None]], pullers: list[Puller]) -> None:
        """Until one fails, or all have finished what they held when the service was told to stop, or the time for it is up."""
        stop = asyncio.create_task(self.ctx.stopping.wait())
        try:
            await asyncio.wait({stop, *running}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        if self.ctx.stopping.is_set():
            for puller in pullers:  # what is given back from here on must not come back to this replica
                await puller.set_prefetch(0)
            await self.ctx.vouch(asyncio.wait(running, timeout=self.config.drain_timeout_s))
        for task in running:
            if task.done():
                task.result()

    async def score(self, group: Group) -> None:
        """The first stage."""
        self.scoring += 1
        try:
            with self.ctx.metrics.busy():
                outcomes = await self.pool.score(job_of(group, self.pool.needs))
        finally:
            self.scoring -= 1
        group.rewards = combine(outcomes, self.config.reward, self.names)
        group.times["scored"] = time.time()
        await self._note_errors(group, outcomes)
        failpoints.reach("reward.scored")
        await self.ctx.queue.publish(self.ctx.subjects.trajectory(group.id), group, msg_id=group.id, once=True)
        failpoints.reach("reward.stored")
        self.groups += 1
        self.samples += len(group.rewards.total)

    async def pass_on(self, group: Group) -> None:
        """The second stage."""
        failpoints.reach("advantages.begun")
        queue, subjects = self.ctx.queue, self.ctx.subjects
        if group.kind == "eval":
            await queue.publish(subjects.reported, fate(group, "evaluated"), msg_id=f"evaluated:{group.id}")
        elif reason := drop_reason(group, self.config.reward.filters):
            self.dropped[reason] += 1
            await self.ctx.events.publish("dropped", f"{group.id}: {reason}", group=group.id, reason=reason)
            await queue.publish(subjects.reported, fate(group, "dropped", reason), msg_id=f"dropped:{group.id}")
        else:
            assert group.rewards is not None
            assert group.samples is not None
            algorithm, limit = self.config.algorithm, self.config.sampling.max_new_tokens
            scores_G = shaped_rewards(group.rewards.total, group.samples.lengths, algorithm, limit)
            group.advantages = group_advantages(scores_G, algorithm.advantage)
            group.times["advantages"] = time.time()
            await hand_on(queue, group, self.config)
        failpoints.reach("advantages.stored")
        self.passed += 1

    async def _note_errors(self, group: Group, outcomes: list[list[Outcome]]) -> None:
        """Count them, and tell of the 1st, 10th, 100th ... of a kind what it was; of processes each."""
        while self.pool.replaced:
            await self.ctx.events.publish("scorer_replaced", self.pool.replaced.popleft())
        for kind, count in kinds(outcomes).items():
            before, self.errors[kind] = self.errors[kind], self.errors[kind] + count
            if len(str(before)) < len(str(self.errors[kind])) or before == 0:
                text = next(one.error for found in outcomes for one in found if one.kind == kind)
                await self.ctx.events.publish(
                    "reward_error", f"{group.id}: {text}", error=kind, so_far=self.errors[kind], group=group.id
                )

    async def _beat(self) -> None:
        await self.ctx.beat(
            "scoring" if self.scoring else "idle", progress=self.groups + self.passed, processes=len(self.pool.pids)
        )
        if time.monotonic() - self.emitted > METRICS_S:
            self.emitted = time.monotonic()
            self._emit()

    def _emit(self) -> None:
        self.ctx.metrics.emit(
            groups_total=self.groups,
            samples_total=self.samples,
            passed_total=self.passed,
            scoring=self.scoring,
            processes=len(self.pool.pids),
            kills_total=self.pool.kills,
            deaths_total=self.pool.deaths,
            **{f"errors_total.{kind}": count for kind, count in self.errors.items()},
            **{f"dropped_total.{reason}": count for reason, count in self.dropped.items()},
        )


def read(data: bytes, scored: bool) -> Group:
    """A group as this stage needs it, or WireError."""
    group = wire.decode(data, Group)
    if group.samples is None:
        raise wire.WireError("group.samples: missing; there is nothing to score")
    if "abort" in group.samples.finish:
        raise wire.WireError("group.samples.finish: holds an aborted sample, which nobody may train on")
    if scored and group.rewards is None:
        raise wire.WireError("group.rewards: missing; a trajectory is scored")
    return group


def job_of(group: Group, needs: set[str]) -> Job:
    """The group as reward functions see it. Token ids are made into lists only if one of them asks."""
    samples = group.samples
    assert samples is not None
    offsets = samples.offsets.tolist()
    with_ids = "completion_ids" in needs
    return Job(
        shared={
            "prompt": group.prompt,
            "answer": group.answer,
            "meta": group.meta,
            "group_id": group.id,
            "completions": samples.texts,
            "prompt_ids": [] if group.prompt_ids is None else group.prompt_ids.tolist(),
        },
        samples=[
            {
                "completion": text,
                "finish": finish,
                "index": index,
                **({"completion_ids": samples.ids[offsets[index] : offsets[index + 1]].tolist()} if with_ids else {}),
            }
            for index, (text, finish) in enumerate(zip(samples.texts, samples.finish, strict=True))
        ],
    )


def fate(group: Group, kind: str, reason: str = "") -> Receipt:
    """The receipt of a group that does not go on."""
    assert group.samples is not None
    assert group.rewards is not None
    scored = [float(reward) for reward in group.rewards.total if reward == reward]
    return Receipt(
        "dropped" if kind == "dropped" else "evaluated",
        group.id,
        issue=group.issue,
        seat=group.seat,
        min_step=group.min_step,
        reason=reason,
        replica=group.replica,
        sample_steps=group.samples.oldest_steps(),
        tokens=len(group.samples.ids),
        reward=sum(scored) / len(scored) if scored else None,
        at=time.time(),
    )
