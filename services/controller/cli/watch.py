"""`slipstream watch`: metrics and events as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .common import AsJson, Nats, OptionalRunFile, RunName, Sets, open_run, plain, print_json, run_async

if TYPE_CHECKING:
    from services.controller.attach import Run
    from shared.records import Event, Metric


def watch(
    run_file: OptionalRunFile = None, sets: Sets = None, nats: Nats = None, run: RunName = None, json: AsJson = False
) -> None:
    """Follow a run's metrics and events, one line each, until Ctrl-C. Anyone may: it only subscribes.

    `slipstream watch run.yaml`

    `slipstream watch --nats nats://10.0.0.5:4222 --run sort-letters --json | grep '"trainer"'`
    """

    async def follow() -> None:
        import asyncio

        async with open_run(run_file, sets, nats, run) as handle:
            async with asyncio.TaskGroup() as tasks:
                for stream in ("metrics", "events"):
                    tasks.create_task(_follow(handle, stream, json))

    run_async(follow)


async def _follow(handle: Run, stream: str, as_json: bool) -> None:
    from shared.wire import UNFIT, decode_any

    last = await handle.queue.last(handle.subjects.wildcard(stream))
    async for data, _ in handle.queue.read(stream, start_seq=last[1] + 1 if last else 1, live=True):
        if data is UNFIT:
            continue
        record = decode_any(data)
        if as_json:
            print_json({"kind_of_record": type(record).__name__.lower(), **plain(record)})
        else:
            print(line(record), flush=True)


def line(record: Metric | Event) -> str:
    import time

    from services.controller.view import event_line
    from shared.records import Event

    if isinstance(record, Event):
        return event_line(record)
    values: Any = " ".join(f"{name}={value:.4g}" for name, value in record.values.items())
    step = "" if record.step is None else f" step {record.step}"
    return f"{time.strftime('%H:%M:%S', time.localtime(record.at))} {record.replica}{step} {values}"
