"""`slipstream status`: one look at a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .common import AsJson, Nats, OptionalRunFile, RunName, Sets, open_run, plain, print_json, run_async

if TYPE_CHECKING:
    from services.controller.attach import Run
    from services.controller.view import RunView


def status(
    run_file: OptionalRunFile = None, sets: Sets = None, nats: Nats = None, run: RunName = None, json: AsJson = False
) -> None:
    """Show where a run stands: step, reward, who is alive, how deep the queues are.

    `slipstream status run.yaml`

    `slipstream status --nats nats://10.0.0.5:4222 --run sort-letters --json`
    """

    async def look() -> None:
        async with open_run(run_file, sets, nats, run) as handle:
            state, view = await handle.state(), await snapshot(handle)
        if json:
            print_json(facts(state, view))
            return
        import time

        from rich.console import Console

        console = Console()
        view.phase = state or "not started"
        console.print(view.render(time.time(), console.width))

    run_async(look)


async def snapshot(handle: Run) -> RunView:
    """A view fed with everything up to now."""
    from services.controller.view import RunView
    from shared.records import Event, Receipt
    from shared.wire import UNFIT, decode

    view = RunView(await handle.config())
    async for data, _ in handle.queue.read("receipts"):
        if data is not UNFIT:
            view.apply(decode(data, Receipt))
    async for data, _ in handle.queue.read("events"):
        if data is not UNFIT:
            view.apply(decode(data, Event))
    view.note(await handle.registry.alive())
    view.depths = {name: depth.messages for name, depth in (await handle.queue.depths()).items()}
    return view


def facts(state: str, view: RunView) -> dict[str, Any]:
    return {
        "run": view.run,
        "state": state,
        "step": view.done,
        "steps": view.steps,
        "issued": view.ledger.issued,
        "trained": view.ledger.trained,
        "dropped": dict(view.ledger.dropped),
        "pending": view.ledger.pending,
        "replicas": [plain(beat) for beat in view.replicas],
        "queues": view.depths,
    }
