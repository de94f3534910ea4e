"""`slipstream events`: what happened in a run."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Annotated

import typer

from .common import AsJson, Nats, OptionalRunFile, RunName, Sets, open_run, print_json, run_async

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def moment(text: str) -> float:
    """`90s`, `10m`, `2h`, `1d` ago, or an ISO time: seconds since the epoch."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return time.time() - float(match[1]) * UNITS[match[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: write 90s, 10m, 2h, 1d, or a time such as 2026-01-31T14:30") from error


def events(
    run_file: OptionalRunFile = None,
    sets: Sets = None,
    nats: Nats = None,
    run: RunName = None,
    service: Annotated[str | None, typer.Option(help="Only events of this service.", show_default=False)] = None,
    replica: Annotated[str | None, typer.Option(help="Only events of this replica.", show_default=False)] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Only events of this kind; may be repeated.", show_default=False)
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="10m", help="Only younger ones: 90s, 10m, 2h, 1d, or an ISO time.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="5m", help="Only older ones, in the same forms.")] = None,
    json: AsJson = False,
) -> None:
    """List a run's events, also when it is over: starts, deaths, restarts, drops, rollbacks, regroupings.

    `slipstream events run.yaml --since 10m`

    `slipstream events run.yaml --kind exit --kind back`

    `slipstream events --nats nats://10.0.0.5:4222 --run sort-letters --service rollout --since 2h --until 1h`
    """
    oldest, newest = moment(since) if since else 0.0, moment(until) if until else float("inf")

    async def show() -> None:
        from services.controller.view import event_line
        from shared.records import Event
        from shared.wire import UNFIT, decode

        async with open_run(run_file, sets, nats, run) as handle:
            subject = handle.subjects.events(service) if service else None
            async for data, _ in handle.queue.read("events", subject=subject):
                if data is UNFIT:
                    continue
                event = decode(data, Event)
                if not oldest <= event.at <= newest or (kind and event.kind not in kind):
                    continue
                if replica and event.replica != replica:
                    continue
                if json:
                    print_json(event)
                else:
                    print(event_line(event), flush=True)

    run_async(show)
