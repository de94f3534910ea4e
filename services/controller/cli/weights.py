"""`slipstream weights`: the versions of a run's weights, and what may be done about them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from .common import FAILED, AsJson, Nats, OptionalRunFile, RunName, Sets, fail, open_run, print_json, run_async

if TYPE_CHECKING:
    from services.controller.attach import Run
    from services.controller.weights_view import WeightsView

POLL_S = 0.5


class ListByDefault(TyperGroup):
    """`slipstream weights run.yaml` is `slipstream weights list run.yaml`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] != ["--help"] and (not args or args[0] not in self.commands):
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ListByDefault,
    no_args_is_help=False,
    rich_markup_mode="markdown",
    help="""Show the versions of a run's weights: who holds which, how it got there, how long each phase took.

`slipstream weights run.yaml`

`slipstream weights rollback 12 run.yaml` goes on from the weights of version 12
""",
)

VersionArgument = Annotated[int, typer.Argument(metavar="VERSION", help="A version number, as listed.", min=1)]


@app.command("list")
def listed(
    run_file: OptionalRunFile = None,
    sets: Sets = None,
    nats: Nats = None,
    run: RunName = None,
    last: Annotated[int, typer.Option(help="So many of the newest versions; 0: all.", min=0)] = 20,
    json: AsJson = False,
) -> None:
    """List the versions (the default)."""

    async def look() -> WeightsView:
        async with open_run(run_file, sets, nats, run) as handle:
            return await _view(handle)

    found = run_async(look)
    found.versions = found.versions[-last:] if last else found.versions
    print_json(found) if json else _show(found)


@app.command("rollback")
def roll_back(
    version: VersionArgument,
    run_file: OptionalRunFile = None,
    sets: Sets = None,
    nats: Nats = None,
    run: RunName = None,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait for the trainer.")] = 120.0,
) -> None:
    """Go on from the weights of an earlier version. They are published as a new version: numbers are never used again.

    The trainer does it, by starting again from its checkpoint of that version's step. Newer checkpoints are set aside, the groups
    trained since are drawn again. Without such a checkpoint it is refused, and nothing changes.

    Exit codes: 0 done, 1 refused or not done in time, 2 config, 3 broker.
    """

    async def act() -> str:
        import asyncio

        from services.dcs.rollback import REFUSED
        from shared.records import Announcement, Event
        from shared.wire import decode

        async with open_run(run_file, sets, nats, run) as handle:
            began = time.time()
            asked = await _dcs(handle, lambda dcs: dcs.roll_back(version))
            while time.time() < began + timeout_s:
                async for data, _ in handle.queue.read("events"):
                    event = decode(data, Event)
                    if event.kind == REFUSED and event.at >= began:
                        raise fail(event.message, FAILED)
                async for data, _ in handle.queue.read("weights", subject=handle.subjects.announced):
                    told = decode(data, Announcement)
                    if told.at >= began and told.reason == f"rollback to version {version}":
                        return f"version {told.version} holds the weights of version {version}, step {told.step}"
                await asyncio.sleep(POLL_S)
            raise fail(
                f"the trainer has not gone back to step {asked['step']} within {timeout_s:g} s; the wish stands: see "
                "`slipstream events`",
                FAILED,
            )

    print(run_async(act))


@app.command("pin")
def pin(
    version: VersionArgument,
    run_file: OptionalRunFile = None,
    sets: Sets = None,
    nats: Nats = None,
    run: RunName = None,
    off: Annotated[bool, typer.Option("--off", help="Keep it no longer.")] = False,
) -> None:
    """Keep the snapshot of a version, however many newer ones come."""

    async def act() -> list[int]:
        async with open_run(run_file, sets, nats, run) as handle:
            return await _dcs(handle, lambda dcs: dcs.pin(version, not off))

    pins = run_async(act)
    print(f"pinned: {', '.join(map(str, pins)) or 'none'}")


@app.command("resync")
def resync(
    replica: Annotated[str, typer.Argument(help="A replica, as listed; `all` for every one.")],
    run_file: OptionalRunFile = None,
    sets: Sets = None,
    nats: Nats = None,
    run: RunName = None,
) -> None:
    """Have a replica pull, load and verify the newest version anew, whatever it holds."""

    async def act() -> dict[str, Any]:
        async with open_run(run_file, sets, nats, run) as handle:
            return await _dcs(handle, lambda dcs: dcs.resync("*" if replica == "all" else replica))

    asked = run_async(act)
    print(f"version {asked['version']} is fetched again by {', '.join(asked['replicas']) or 'nobody'}")


async def _dcs(handle: Run, call: Any) -> Any:
    """Ask the run's DCS; its no is a line and an exit code."""
    from services.dcs.client import DcsClient, DcsUnavailable, Refused

    async with DcsClient(handle.kv) as dcs:
        try:
            return await call(dcs)
        except (Refused, DcsUnavailable) as error:
            raise fail(str(error), FAILED) from error


async def _view(handle: Run) -> WeightsView:
    from services.controller.weights_view import view
    from services.dcs.state import STATE_KEY, State
    from shared.records import Announcement, Received
    from shared.wire import decode

    subjects, entry = handle.subjects, await handle.kv.get(STATE_KEY)
    told = [decode(data, Announcement) async for data, _ in handle.queue.read("weights", subject=subjects.announced)]
    answers = [decode(data, Received) async for data, _ in handle.queue.read("weights", subject=subjects.received)]
    return view(told, answers, State.load(entry[0]) if entry else State())


def _show(found: WeightsView) -> None:
    """A line a version, and below it one a replica: wide tables do not fit a terminal."""
    from datetime import datetime

    for one in found.versions:
        when = datetime.fromtimestamp(one.at).strftime("%H:%M:%S")
        pinned = " (pinned)" if one.pinned else ""
        head = f"v{one.version}{pinned}  step {one.step}  {when}  {one.digest[:12]}  {one.reason}  {one.result or '-'}"
        print(f"{head}  {_phases(one.publisher)}".rstrip())
        for replica, delivery in sorted(one.replicas.items()):
            print(f"    {replica}  {delivery.how}  {delivery.error or _phases(delivery.seconds)}".rstrip())
    held = ", ".join(f"{replica}: v{version}" for replica, version in sorted(found.held.items())) or "nobody"
    print(f"verified last: {held}")
    print(f"in the broadcast group (epoch {found.epoch}): {', '.join(found.members) or 'nobody'}")


def _phases(seconds: dict[str, float]) -> str:
    """Seconds, by phase."""
    return " ".join(f"{name.removesuffix('_s')} {value:.3f}" for name, value in seconds.items())
