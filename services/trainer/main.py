"""The trainer service: take the groups of an update, accumulate their gradients as they arrive, step, publish, acknowledge.

    begin (checkpoint, or model folder and supervised phase) -> publish weights -> for each update:
    take P groups -> forward and backward, micro-batch by micro-batch -> update -> receipts and weights
    now and then: copy the state -> write it while training goes on -> acknowledge what it covers

With `placement: colocate` all P groups are awaited first, and then the turn on the device (turn.py); it is left after the update.

This is the leader of the trainer's ranks; the others do what it does (ranks.py) and know no broker.

Guarantees: one trainer a run (a lease; of two, the older is fenced by the queue, the DCS, the checkpoints and the ledger); a
receipt `trained` is written after the update that used the group; its message is acknowledged only when a checkpoint covers it;
the weights of each step are published once as a new version; a batch without any signal is a step that changes no weight. Told
to stop, it saves what it has, acknowledges that, and leaves. At the end the policy lies in
`<workdir>/model`. Killed anywhere: tests/chaos/test_determinism.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from typing import Any

from services.dcs import rollback
from services.trainer.algorithms import first_pass, needs_first_pass
from services.trainer.algorithms.reductions import finish, merge
from services.trainer.build import open_stages
from services.trainer.channel import RankLost
from services.trainer.checkpoint import CheckpointError, CheckpointStore
from services.trainer.intake import Intake, Rollback, sample_steps
from services.trainer.layout import LayoutError
from services.trainer.megatron.options import NativeOptionError
from services.trainer.megatron.policy import NonFiniteError, StateMismatch
from services.trainer.model_folder import ModelFolderError
from services.trainer.objectives import Objective
from services.trainer.rollback import roll_back
from services.trainer.saving import Saver
from services.trainer.schedule import learning_rate
from services.trainer.spread import Spread
from services.trainer.start import Interrupted, Start, begin, meta_of
from services.trainer.tensorfile import DiskFullError
from services.trainer.turn import DeviceTurn
from services.trainer.update import UpdateBatches
from services.trainer.weights import WeightPublisher
from services.trainer.wishes import unless_wished
from shared import failpoints, rounds, wire
from shared.records import Group, Receipt
from shared.service import Context, ServiceFailed
from shared.tokenizer import TokenizerError

FAULTS = (
    ModelFolderError,
    NativeOptionError,
    LayoutError,
    RankLost,
    CheckpointError,
    DiskFullError,
    StateMismatch,
    NonFiniteError,
    TokenizerError,
)
"""What a person must mend: their texts say how."""


async def main(ctx: Context) -> None:
    """Train until the run's last step, or until told to stop."""
    lease = await ctx.registry.claim("trainer", ctx.replica)
    try:
        await train(ctx)
    except Interrupted as error:
        await ctx.events.publish("interrupted", str(error))
    except FAULTS as error:
        raise ServiceFailed(str(error)) from error
    finally:
        await lease.release()


async def train(ctx: Context) -> None:
    keeping = ctx.config.trainer.checkpoint
    store = CheckpointStore(
        ctx.config.work_path / "checkpoints",
        keeping.keep,
        keep_every=keeping.keep_every,
        keep_best=keeping.keep_best,
        model_folder=ctx.config.path(ctx.config.model.path),
    )
    turn = DeviceTurn(ctx)
    if not await turn.take():
        raise Interrupted("stopped before the engines left the device to the trainer")
    start = await begin(ctx, store)
    turn.policy = start.policy
    try:
        await go_on(ctx, start, store, turn)
    finally:
        await ctx.compute(start.policy.close)


async def go_on(ctx: Context, start: Start, store: CheckpointStore, turn: DeviceTurn) -> None:
    stages = await ctx.compute(open_stages, ctx.config, start.policy)
    publisher = WeightPublisher(ctx, ctx.config.path(ctx.config.model.path), stages)
    version = await publisher.publish(start.step, start.policy.outgoing(), start.reason)
    intake = Intake(ctx, start.window, start.rollbacks, start.epoch)
    try:
        await intake.open()
        failpoints.reach("trainer.taken")
        await roll_back(ctx, start, intake, version)
        if start.wish is not None:
            await rollback.done(ctx.kv)
        intake.follow()
        await unless_wished(ctx, store, Training(ctx, start, store, publisher, intake, version, turn).run())
        await publisher.settled()
        await turn.settled()
    finally:
        await intake.close()
        await publisher.close()


class Training:
    """The loop. `step` counts finished updates; `version` is that of the weights which the last one started from."""

    def __init__(
        self,
        ctx: Context,
        start: Start,
        store: CheckpointStore,
        publisher: WeightPublisher,
        intake: Intake,
        version: int,
        turn: DeviceTurn,
    ) -> None:
        self.ctx, self.config = ctx, ctx.config
        self.policy, self.roles = start.policy, start.roles
        self.step, self.version = start.step, version
        self.publisher, self.intake, self.turn = publisher, intake, turn
        self.saver = Saver(ctx, store, start.policy.ranks, start.roles.states)
        self.loss = Objective("policy", ctx.config.algorithm)
        self.window_state = intake.window.state()
        self.uncovered: list[str] = []
        self.rewards: list[float] = []
        """Of the samples trained since the last checkpoint."""
        self.next_issue = start.next_issue

    async def run(self) -> None:
        try:
            await self.go()
            await self.settled()
        finally:
            await self.saver.close()
        if self.step == self.config.steps and await self.may_save("the model folder"):
            await self.ctx.compute(self.policy.save_hf, self.config.work_path / "model")
        await self.rest()

    async def go(self) -> None:
        await self.rest()
        while self.step < self.config.steps and not self.ctx.stopping.is_set():
            began = time.monotonic()
            batch = await self.accumulate()
            if batch is None:
                break
            groups, sums = batch
            with self.ctx.metrics.busy():
                outcome = await self.ctx.compute(self.update, groups, sums["denominator"])
            failpoints.reach("trainer.updated")
            self.step += 1
            self.next_issue = max(group.issue for group in groups) + 1
            self.window_state = self.intake.window.state()
            self.uncovered += [group.id for group in groups]
            receipts = list(trained_receipts(groups, self.step - 1, self.intake.rollbacks))
            last = self.step == self.config.steps
            if last:  # the run ends with these receipts: nothing may be missing then
                await self.save(untold=receipts)
                await self.settled()
            await self.tell(receipts)
            self.report(groups, {**finish(sums), **outcome, "step_s": time.monotonic() - began})
            if last:
                await self.ctx.vouch(self.cover(self.uncovered, self.step, self.version))
            else:
                if self.step % self.config.trainer.checkpoint.every == 0:
                    await self.checkpoint()
                await self.rest()
        if self.uncovered and self.step < self.config.steps and await self.may_save("the last updates"):
            await self.checkpoint()

    async def may_save(self, what: str) -> bool:
        """The device, for something that is saved before this service leaves; at most as long as leaving may take."""
        if await self.turn.take(self.config.drain_timeout_s):
            return True
        text = f"{what}: the engines did not leave the device in time; whoever goes on does it again"
        await self.ctx.events.publish("not_saved", text, step=self.step)
        return False

    async def rest(self) -> None:
        """Leave a shared device to the engines, on the newest weights."""
        if not self.turn.held or not self.config.colocated:
            return
        version = await self.ctx.vouch(self.publisher.announced())
        await self.turn.give(version, self.publisher.unshare)

    def take_in(self, batches: UpdateBatches, group: Group) -> list[Spread]:
        """The group with the columns that are made here; the micro-batches that can be trained on now."""
        self.roles.fill(group)
        return batches.add(group)

    def update(self, groups: list[Group], denominator: float) -> dict[str, float]:
        """Move the policy, and the models beside it."""
        rate = learning_rate(self.step, self.config.steps, self.config.trainer.optimizer)
        learnt = self.roles.learn(groups, self.step)
        if self.roles.policy_waits(self.step):
            self.policy.discard()
            return learnt | {"updated": 0.0}
        outcome = self.policy.update(denominator, rate)
        self.roles.moved(self.step + 1)
        return learnt | outcome

    async def accumulate(self) -> tuple[list[Group], dict[str, float]] | None:
        """The groups of the next update and the sums of their gradients, or None when the service is to stop."""
        batches = UpdateBatches(self.config, self.step)
        parts: list[dict[str, float]] = []
        ahead = [] if self.turn.held else await self.all_groups()
        if ahead is None:
            return None
        while not batches.complete:
            await self.beat("waiting for groups")
            group = ahead.pop(0) if ahead else await self.saver.unless_failed(self.intake.take(self.step))
            if group is None:
                await self.ctx.compute(self.policy.discard)
                return None
            with self.ctx.metrics.busy():
                ready = await self.ctx.compute(self.take_in, batches, group)
                loss = await self.loss_of(ready)
            for spread in ready:
                await self.beat("training")
                with self.ctx.metrics.busy():
                    parts.append(
                        await self.ctx.compute(
                            self.policy.forward_backward, spread, loss, self.config.sampling.temperature
                        )
                    )
        if self.config.deterministic and not await self.intake.until_settled(self.round_end()):
            await self.ctx.compute(self.policy.discard)
            return None
        return batches.groups, merge(parts)

    async def all_groups(self) -> list[Group] | None:
        """All groups of the update, and with them the turn on the device: the engines have nothing more to do for it. None when
        the service is to stop."""
        groups: list[Group] = []
        while len(groups) < self.config.groups_per_step:
            await self.beat("waiting for groups")
            if (group := await self.saver.unless_failed(self.intake.take(self.step))) is None:
                return None
            groups.append(group)
        if self.config.deterministic and not await self.intake.until_settled(self.round_end()):
            return None
        failpoints.reach("trainer.complete")
        return groups if await self.turn.take() else None

    def round_end(self) -> int:
        """Before the next weights exist, everything that is to be drawn under these has to be here (shared/rounds.py)."""
        config = self.config
        return rounds.end(
            steps=config.steps,
            groups_per_step=config.groups_per_step,
            slots=config.slots,
            step=self.step,
            head=self.next_issue,
        )

    async def loss_of(self, spreads: list[Spread]) -> Objective:
        """The loss; where it depends on all tokens of the update these are looked at first, without gradients."""
        algorithm, temperature = self.config.algorithm, self.config.sampling.temperature
        if not needs_first_pass(algorithm):
            return self.loss
        seen = [tokens for one in spreads for tokens in await self.ctx.compute(self.policy.observe, one, temperature)]
        return Objective("policy", algorithm, await self.ctx.compute(first_pass, algorithm, seen))

    async def tell(self, receipts: list[Receipt]) -> None:
        """Free the groups' slots, and hand the new weights over: they get their number while the next update is under way."""
        with self.ctx.metrics.wait("weights"):
            self.version = await self.publisher.numbered()
            handing = self.publisher.hand_over(self.step, self.policy.outgoing(), "update")
            if self.step == self.config.steps:  # the run is over with these receipts, and the DCS may leave
                await self.ctx.vouch(handing)
                await self.ctx.vouch(self.publisher.announced())
                await self.ctx.vouch(self.intake.write(receipts))
            else:
                await self.ctx.vouch(asyncio.gather(self.intake.write(receipts), handing))
        failpoints.reach("trainer.told")

    async def checkpoint(self) -> None:
        """Save what is to be acknowledged; that happens when it is durable, while training goes on."""
        await self.save(then=partial(self.cover, self.uncovered, self.step, self.version))
        self.uncovered = []

    async def save(
        self, untold: Iterable[Receipt] = (), then: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """Begin a checkpoint of this step. `untold`: receipts of its last update, if they are not written yet. `then`: what
        follows when it is durable."""
        meta = meta_of(self.window_state, self.intake.rollbacks, self.next_issue)
        meta |= {"version": self.version, "trained": self.uncovered, "untold": [wire.encode(one) for one in untold]}
        score = sum(self.rewards) / len(self.rewards) if self.rewards else None
        with self.ctx.metrics.wait("checkpoint"):
            await self.saver.begin(self.step, meta, score, then)
        self.rewards = []

    async def cover(self, group_ids: list[str], step: int, version: int) -> None:
        """A durable checkpoint holds these groups: acknowledge them."""
        failpoints.reach("trainer.saved")
        await self.intake.covered(group_ids)
        failpoints.reach("trainer.covered")
        await self.ctx.events.publish("checkpoint", f"step {step}", step=step, version=version)

    async def settled(self) -> None:
        """Until all that was saved is durable and acknowledged."""
        with self.ctx.metrics.wait("checkpoint"):
            await self.saver.settled()

    async def beat(self, state: str) -> None:
        await self.ctx.beat(state, progress=self.step, version=self.version, step=self.step)

    def report(self, groups: list[Group], values: dict[str, float]) -> None:
        rewards = [float(r) for group in groups if group.rewards for r in group.rewards.total if r == r]
        self.rewards += rewards
        drawn = [step for group in groups for step in sample_steps(group, self.intake.rollbacks) if step >= 0]
        ages = [self.step - 1 - int(step) for step in drawn] or [0]
        self.ctx.metrics.emit(
            step=self.step,
            reward=sum(rewards) / len(rewards) if rewards else float("nan"),
            staleness_mean=sum(ages) / len(ages),
            staleness_max=max(ages),
            version=self.version,
            **values,
        )


def trained_receipts(groups: list[Group], update: int, rollbacks: list[Rollback]) -> Iterator[Receipt]:
    """One `trained` receipt a group: what the ledger counts and the audit checks."""
    now = time.time()
    for group in groups:
        assert group.samples is not None
        scored = [] if group.rewards is None else [float(r) for r in group.rewards.total if r == r]
        yield Receipt(
            "trained",
            group.id,
            issue=group.issue,
            seat=group.seat,
            min_step=group.min_step,
            step=update,
            replica=group.replica,
            sample_steps=sample_steps(group, rollbacks),
            tokens=len(group.samples.ids),
            reward=sum(scored) / len(scored) if scored else None,
            at=now,
        )
