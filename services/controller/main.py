"""The controller service: fold receipts, issue what the credits allow, evaluate, say when the run is over.

    claim the role -> restore from receipts and KV -> loop: news, numbers, verdict, evaluation, issue

One is active (a lease). All its state is in the receipts and in KV, so it may be killed at any moment. Its REST API is on
`controller.host:port`; the URL is in its heartbeat. tests/controller/test_controller.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from services.controller import api
from services.controller.dispatch import Dispatcher, follow_receipts, open_sources
from services.controller.finish import Verdict, judge
from services.controller.scaling import routes
from services.controller.scaling.autopilot import Autopilot
from services.controller.scaling.autopilot import router as autoscaler_router
from services.controller.scaling.scaler import Scaler, running
from shared import failpoints
from shared.http_auth import guard
from shared.http_server import listen, serving
from shared.network import http_url
from shared.service import Context, ServiceFailed

POLL_S = 0.5
STATE_KEY = "state"


async def main(ctx: Context) -> None:
    """Run until the run is over or the service is told to stop."""
    lease = await ctx.registry.claim("controller", ctx.replica)
    try:
        listener = listen(ctx.config.controller.host, ctx.config.controller.port, "controller")
        with contextlib.closing(listener):
            scaler = Scaler(ctx)
            await scaler.restore()
            dispatcher = Dispatcher(ctx, *await open_sources(ctx), on_receipt=scaler.saw)
            await ctx.vouch(dispatcher.restore())
            controller = Controller(ctx, dispatcher)
            app = api.build(ctx, controller.progress, lambda: controller.last_round)
            app.include_router(routes.router(scaler))
            autopilot = Autopilot(scaler, rules) if (rules := ctx.config.controller.autoscale) else None
            app.include_router(autoscaler_router(autopilot))
            async with serving(guard(app, ctx.config.controller.host, "controller"), listener):
                controller.url = http_url(listener, ctx.connection.url)
                async with running(scaler.run(), *([autopilot.run()] if autopilot else [])):
                    await controller.run()
    finally:
        await lease.release()


class Controller:
    """The loop."""

    def __init__(self, ctx: Context, dispatcher: Dispatcher) -> None:
        self.ctx, self.dispatcher = ctx, dispatcher
        self.state, self.url = "running", ""
        self.last_round = time.monotonic()
        self.news: asyncio.Queue[tuple[bytes, int]] = asyncio.Queue(maxsize=4096)

    async def run(self) -> None:
        async with self._following() as following:
            while not self.ctx.stopping.is_set():
                self.last_round = time.monotonic()
                await self._beat()
                await self._report()
                verdict = judge(self.dispatcher.credits, self.dispatcher.evaluations, self.ctx.config.eval.min_reward)
                if verdict.finished or verdict.failed:
                    return await self._end(verdict)
                await self.ctx.vouch(self.dispatcher.evaluate())  # a full stream makes it wait, and that is no fault
                if verdict.may_train and await self.dispatcher.up_to_date():
                    await self.ctx.vouch(self.dispatcher.issue())
                await self._fold_news()
                if following.done():
                    following.result()

    def progress(self) -> dict[str, Any]:
        """What the API tells of the run itself."""
        credits, dispatcher = self.dispatcher.credits, self.dispatcher
        return {
            "run": self.ctx.run,
            "state": self.state,
            "step": credits.step,
            "steps": self.ctx.config.steps,
            "slots": credits.rules.slots,
            "in_flight": credits.in_flight,
            "issued": credits.ledger.issued,
            "trained": credits.ledger.trained,
            "dropped": dict(credits.ledger.dropped),
            "reward": dispatcher.stats.newest[1] if dispatcher.stats.newest else None,
            "evaluations": dispatcher.evaluations.means(),
        }

    @contextlib.asynccontextmanager
    async def _following(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(follow_receipts(self.ctx, self.dispatcher.last_seq + 1, self.news))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _fold_news(self) -> None:
        """Everything that lies there; if nothing does, the next receipt or a moment's rest."""
        with self.ctx.metrics.wait("receipts"):
            first = await self.ctx.stop_or(self.news.get(), POLL_S)
        batch = [first] if first is not None else []
        while not self.news.empty():
            batch.append(self.news.get_nowait())
        for message, seq in batch:
            mark = self.dispatcher.fold(message, seq)
            if mark is not None:
                await self._tell_evaluation(mark)

    async def _tell_evaluation(self, mark: int) -> None:
        evaluations = self.dispatcher.evaluations
        mean, scored = evaluations.mean(mark), len(evaluations.scored(mark))
        text = "nothing could be scored" if mean is None else f"reward {mean:.4f} over {scored} prompts"
        await self.ctx.events.publish("evaluated", f"step {mark}: {text}", step=mark, reward=mean, scored=scored)
        if mean is not None:
            self.ctx.metrics.emit(
                step=mark, eval_reward=mean, eval_scored=scored, eval_oldest_step=evaluations.oldest.get(mark, mark)
            )

    async def _report(self) -> None:
        credits = self.dispatcher.credits
        for step, values in self.dispatcher.closed_updates():
            drops = {f"dropped.{reason}": count for reason, count in credits.ledger.dropped.items()}
            self.ctx.metrics.emit(
                step=step,
                pending=credits.in_flight,
                slots=credits.rules.slots,
                issued_total=credits.ledger.issued,
                receipts_unreadable_total=self.dispatcher.unreadable,
                trained_total=credits.ledger.trained,
                dropped_total=credits.ledger.dropped.total(),
                **drops,
                **values,
            )

    async def _beat(self) -> None:
        credits = self.dispatcher.credits
        await self.ctx.beat(
            "dispatching",
            progress=credits.ledger.issued,
            step=credits.step,
            url=self.url,
            in_flight=credits.in_flight,
            slots=credits.rules.slots,
        )

    async def _end(self, verdict: Verdict) -> None:
        """Put on record that the run is over: every service leaves on reading it."""
        self.state = f"failed:{verdict.failed}" if verdict.failed else "finished"
        credits = self.dispatcher.credits
        text = verdict.failed or f"{credits.step} steps, {credits.ledger.trained} groups trained"
        await self.ctx.events.publish("run_failed" if verdict.failed else "run_finished", text, step=credits.step)
        failpoints.reach("controller.over")
        await self.ctx.kv.put(STATE_KEY, self.state.encode())
        if verdict.failed:
            raise ServiceFailed(verdict.failed)
