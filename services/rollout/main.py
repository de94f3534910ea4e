"""The rollout service: fetch verified weights, start an engine on them, then turn prompts into groups with samples.

    bootstrap (newest snapshot, verified) -> engine -> pull a prompt -> wait for its min_step -> sample -> hand on -> ack

Guarantees: a prompt is pulled only when there is a free slot for it; it is started only under verified weights of its
`min_step` or newer (in a deterministic run: of exactly that step, in one go, see shared/rounds.py); it is acknowledged only after
its samples are stored as a reward request; a prompt that this replica cannot finish goes back to the queue at once. If the engine
dies, the replica starts another one from the newest weights and carries on.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from services.dcs.client import DcsUnavailable
from services.rollout import elsewhere
from services.rollout.caution import Caution, Place, at_work
from services.rollout.draw import Drawer
from services.rollout.engines.client import EngineClient, EngineDead, EngineError, EngineTimeout
from services.rollout.engines.process import EngineKilled, EngineProcess, EngineStartError, vocabulary
from services.rollout.engines.watch import until_hung
from services.rollout.episodes import Aborted, EpisodeError
from services.rollout.seat import Seat
from services.rollout.tries import LAST_RESORT, Tries
from services.rollout.weights import WeightReceiver
from shared import failpoints, waivers, wire
from shared.errors import AckTimeout, TransportError
from shared.pull import Delivery, Puller
from shared.records import Group, Receipt, ints
from shared.service import Context, ServiceFailed
from shared.tokenizer import Tokenizer, TokenizerError
from shared.waivers import Waivers

log = logging.getLogger(__name__)

POLL_S = 1.0
BACK_OFF_S = (0.0, 1.0, 2.0, 5.0, 15.0)
HAND_OVER_S = 5.0
"""What the engine may take to end its requests and the broker to store what they have."""
STEADY_S = 30.0
"""An engine that served for so long was no failed try: the next one is started at once."""


async def main(ctx: Context) -> None:
    """Serve with one engine after another until told to stop."""
    deaths, options = 0, ctx.config.rollout
    with weights_cache(ctx.run, ctx.replica) as cache, at_work(cache / "at-work") as died:
        caution = Caution(options.max_running_groups, options.max_deliveries, careful=died)
        url = await elsewhere.engine_url(ctx)
        again = False
        while not ctx.stopping.is_set():
            began = time.monotonic()
            try:
                if url and not await elsewhere.reach(ctx, url, again=again):
                    return
                again = True
                await _with_engine(ctx, cache, caution, url)
            except (EngineDead, EngineKilled) as error:
                deaths = 0 if time.monotonic() - began > STEADY_S else deaths
                await ctx.events.publish("engine_died", str(error), lived_s=round(time.monotonic() - began, 1))
                await ctx.vouch(ctx.sleep(BACK_OFF_S[min(deaths, len(BACK_OFF_S) - 1)]))
                deaths += 1
            except (EngineStartError, TokenizerError) as error:
                raise ServiceFailed(str(error)) from error
            except DcsUnavailable:
                if not ctx.stopping.is_set():
                    raise


@contextmanager
def weights_cache(run: str, replica: str) -> Iterator[Path]:
    """Where this replica keeps what it pulls: the same folder for the process that takes its place when it is killed, so that
    nothing is left behind, and what was pulled is not pulled again."""
    root = Path(tempfile.gettempdir(), f"slipstream-{os.getuid()}", run, replica)
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # two runs of one name on this host
            with tempfile.TemporaryDirectory(prefix=f"{replica}-") as other:
                yield Path(other)
            return
        yield root
        shutil.rmtree(root, ignore_errors=True)  # not reached by a process that fails: the next one goes on from it


async def _with_engine(ctx: Context, cache: Path, caution: Caution, url: str) -> None:
    receiver = WeightReceiver(ctx, cache)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(receiver.close)
        await ctx.beat("fetching weights")
        if (start := await ctx.vouch(receiver.bootstrap())) is None:
            return
        seat = Seat(ctx)
        if not await seat.enter():
            return
        stack.push_async_callback(seat.leave)  # behind the engine's end
        await ctx.beat("starting engine")
        vocab = vocabulary(start.folder)
        if url:
            engine = await stack.enter_async_context(EngineClient(url, vocab=vocab))
            await elsewhere.give_weights(ctx, engine, start)
        else:
            starting = EngineProcess.start_for(ctx.config, start.folder, weight_version=str(start.version))
            process = await ctx.vouch(starting)
            stack.push_async_exit(_ending(ctx, process))
            engine = await stack.enter_async_context(EngineClient(process.url, vocab=vocab))
        await ctx.vouch(receiver.attach(engine, start))
        tokenizer = await ctx.compute(Tokenizer, start.folder)
        await ctx.events.publish("joined", f"serving version {start.version}", version=start.version, step=start.step)
        await Worker(ctx, engine, receiver, tokenizer, caution, seat).run()


def _ending(ctx: Context, process: EngineProcess) -> Callable[..., Awaitable[None]]:
    """Ends the engine with the block that used it: with time to finish, or at once if it hangs or is gone already."""

    async def end(_: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        await ctx.vouch(process.stop(0.0 if isinstance(error, EngineDead) else None))

    return end


class Worker:
    """Runs up to `rollout.max_running_groups` groups at once on one engine: so many slots, each with one group at a time."""

    def __init__(
        self,
        ctx: Context,
        engine: EngineClient,
        receiver: WeightReceiver,
        tokenizer: Tokenizer,
        caution: Caution,
        seat: Seat | None = None,
    ) -> None:
        self.ctx, self.engine, self.receiver, self.tokenizer = ctx, engine, receiver, tokenizer
        self.drawer = Drawer(ctx, engine, tokenizer, receiver.step_of)
        self.caution, self.seat = caution, seat or Seat(ctx)
        self.tries = Tries(ctx.kv, ctx.config.rollout.max_deliveries)
        self.running = self.groups = self.samples = self.tokens = 0
        self.engine_errors = self.engine_timeouts = 0
        self._changed = time.monotonic()

    async def run(self) -> None:
        """Sample until told to stop, then drain."""
        options = self.ctx.config.rollout
        puller = await self.ctx.queue.pull(
            "prompts",
            "rollout",
            prefetch=0,
            max_deliveries=LAST_RESORT * options.max_deliveries,
            ack_wait_s=self.ctx.config.redeliver_after_s,
        )
        following = asyncio.create_task(self.receiver.run())
        slots = [asyncio.create_task(self._slot(puller)) for _ in range(options.max_running_groups)]
        watching = asyncio.create_task(self._watch_engine())
        seated = asyncio.create_task(self.seat.run(self.engine, self.receiver))
        tasks = {*slots, following, watching, seated}
        try:
            while not self.ctx.stopping.is_set():
                await self._beat()
                await self.caution.trust()
                done, _ = await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        except EngineDead:  # nothing more can be finished on it
            self.caution.engine_died()
            for task in tasks:
                task.cancel()
            raise
        finally:
            watching.cancel()
            await puller.stop()
            await self.ctx.vouch(self._drain(slots))
            # while it still follows: a broadcast that counts on this engine is finished first
            await self.ctx.vouch(self.receiver.leave())
            following.cancel()
            seated.cancel()
            await self.ctx.vouch(asyncio.gather(following, watching, seated, return_exceptions=True))

    async def _watch_engine(self) -> None:
        config = self.ctx.config
        await until_hung(
            self.engine.url,
            silent_s=config.heartbeat_ttl_s,
            stuck_s=config.hang_timeout_s,
            asleep=lambda: self.seat.state != "awake",
        )

    async def _slot(self, puller: Puller) -> None:
        """One group after another. Waiting here is what asks the broker for a prompt, so a busy replica hoards none."""
        while not (self.ctx.stopping.is_set() or puller.stopped):
            async with self.caution.place() as place:
                delivery = await puller.next(POLL_S)
                if delivery is not None:
                    await self._take(delivery, place)

    async def _take(self, delivery: Delivery, place: Place) -> None:
        try:
            if why := await self.tries.verdict(delivery):
                await self.ctx.queue.bury(delivery, "rollout", why)
                return
            await place.taken(delivery.delivered)
            self._count(1)
            try:
                await self._episode(delivery, place)
            finally:
                self._count(-1)
        finally:
            if delivery.held:  # the engine died while it waited to run alone
                await delivery.nak()

    def _count(self, change: int) -> None:
        """Keep the clocks: busy while any group runs, waiting for prompts else."""
        now = time.monotonic()
        self.ctx.metrics.add("busy_s" if self.running else "wait_s.prompts", now - self._changed)
        self._changed, self.running = now, self.running + change

    async def _beat(self) -> None:
        await self.ctx.beat(
            self.seat.state if self.seat.state != "awake" else "sampling" if self.running else "idle",
            progress=self.groups,
            version=self.receiver.version,
            step=self.receiver.step,
            running=self.running,
        )
        self.ctx.metrics.emit(
            groups_total=self.groups,
            samples_total=self.samples,
            tokens_total=self.tokens,
            running=self.running,
            engine_errors_total=self.engine_errors,
            engine_timeouts_total=self.engine_timeouts,
            **{f"samples_{name}_total": count for name, count in asdict(self.drawer.counts).items()},
        )

    async def _drain(self, slots: list[asyncio.Task[None]]) -> None:
        """Let what is running finish. What does not in time is ended with the tokens it has, for the next replica to continue,
        and goes back to the queue."""
        _, late = await asyncio.wait(slots, timeout=self.ctx.config.drain_timeout_s)
        if late:
            self.drawer.stopping = True
            with suppress(EngineError):
                await self.engine.abort(everything=True)
            _, late = await asyncio.wait(late, timeout=HAND_OVER_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*slots, return_exceptions=True)

    async def _episode(self, delivery: Delivery, place: Place) -> None:
        """One group, from its prompt to the stored reward request."""
        try:
            group = wire.decode(delivery.data, Group)
            await self._sample(group, delivery, place)
        except EngineDead:
            await delivery.nak()
            raise
        except Aborted as error:
            log.info("%s: %s; it will be sampled again", delivery.msg_id, error)
            await delivery.nak()
        except AckTimeout as error:  # it comes again, and what it became is stored already
            log.warning("%s", error)
            delivery.release()
        except (asyncio.CancelledError, TransportError):
            await delivery.nak()
            raise
        except Exception as error:  # whatever a group does costs that group a delivery, and not the replica
            self.engine_timeouts += isinstance(error, EngineTimeout)
            self.engine_errors += isinstance(error, EngineError) and not isinstance(error, EngineTimeout)
            text = f"{delivery.msg_id}: {type(error).__name__}: {error}"
            log.warning("%s", text, exc_info=not isinstance(error, EngineError | EpisodeError | wire.WireError))
            await self.ctx.events.publish("episode_failed", text, group=delivery.msg_id, delivery=delivery.delivered)
            await delivery.nak(1.0)

    async def _sample(self, group: Group, delivery: Delivery, place: Place) -> None:
        ctx, config = self.ctx, self.ctx.config
        prompt_ids = self.tokenizer.encode_prompt(group.prompt)
        if len(prompt_ids) > config.sampling.max_prompt_tokens:
            await self._drop(
                group, f"{len(prompt_ids)} tokens, sampling.max_prompt_tokens is {config.sampling.max_prompt_tokens}"
            )
            await delivery.ack()
            return
        exact = config.deterministic and group.kind == "train"
        while group.samples is None:
            if not await self._have_weights(group, place):
                await delivery.nak()
                return
            if exact and self.receiver.step > group.min_step:
                log.info("%s: the round of step %d is over, so it was sampled before", group.id, group.min_step)
                await delivery.ack()
                return
            with self.seat.drawing():
                if place.suspect:
                    await self.tries.begin(group.id)
                started = time.time()
                samples = await self.drawer.draw(group, prompt_ids, delivery)
            if exact and not samples.drawn_under(group.min_step):
                log.info("%s: interrupted by a switch of weights; it is drawn again", group.id)
                continue
            group.prompt_ids, group.samples, group.replica = ints(prompt_ids), samples, ctx.replica
            group.times |= {"started": started, "sampled": time.time()}
        failpoints.reach("rollout.sampled")
        await ctx.queue.publish(ctx.subjects.reward_requests, group, msg_id=group.id)
        failpoints.reach("rollout.stored")
        await delivery.ack()
        failpoints.reach("rollout.acked")
        await self.drawer.forget(group)
        await self.caution.trust(came_through=True)
        if place.suspect:
            await self.tries.came_through(group.id)
        self.groups += 1
        self.samples += group.sampling.n
        self.tokens += len(group.samples.ids)

    async def _have_weights(self, group: Group, place: Place) -> bool:
        """Wait for verified weights under which the group may be drawn, on an engine that is awake. False when the service is to
        stop."""
        ctx, needed = self.ctx, group.min_step
        while self.receiver.step < needed or not self.seat.open:
            async with place.resting():
                while not (await self.receiver.wait_step(needed, POLL_S) and await self.seat.opened(POLL_S)):
                    if ctx.stopping.is_set():
                        return False
                    with suppress(TransportError):  # the broker is away; it is looked up in the next round
                        needed = Waivers.load(await ctx.kv.get(waivers.KEY)).min_step(group)
        return True

    async def _drop(self, group: Group, why: str) -> None:
        ctx = self.ctx
        await ctx.events.publish(
            "dropped", f"{group.id}: prompt_too_long: {why}", group=group.id, reason="prompt_too_long"
        )
        receipt = Receipt(
            "dropped" if group.kind == "train" else "evaluated",
            group.id,
            issue=group.issue,
            seat=group.seat,
            min_step=group.min_step,
            reason="prompt_too_long",
            replica=ctx.replica,
            at=time.time(),
        )
        await ctx.queue.publish(ctx.subjects.reported, receipt, msg_id=f"dropped:{group.id}")
