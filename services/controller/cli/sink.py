"""`slipstream sink`: hand a run's metrics and events on to another system."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import CONFIG, Nats, OptionalRunFile, RunName, Sets, fail, open_run, run_async

if TYPE_CHECKING:
    from services.controller.attach import Run
    from services.sinks.follow import Position, Sink

WAIT_S = 60.0
"""For a run that is not there yet."""
Offline = Annotated[bool, typer.Option("--offline", help="Write files; nothing is sent.")]
Project = Annotated[str, typer.Option(help="The project that the run is put into.")]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Hand a run's metrics and events on to another system, until the run is over. docs/metrics.md

`slipstream sink prometheus --nats nats://10.0.0.5:4222 --run sort-letters`

`slipstream sink jsonl run.yaml --out metrics.jsonl`
""",
)


@app.command()
def jsonl(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file; it is gone on with if it is there.")],
    run_file: OptionalRunFile = None,
    sets: Sets = None,
    nats: Nats = None,
    run: RunName = None,
) -> None:
    """Write one JSON object a line."""

    async def make(handle: Run) -> tuple[Sink, Position]:
        from services.sinks.jsonl import JsonLines

        sink = JsonLines(out)
        return sink, sink.position

    _serve(make, run_file, sets, nats, run)


@app.command()
def tensorboard(
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder, for `tensorboard --logdir FOLDER`.")],
    run_file: OptionalRunFile = None,
    sets: Sets = None,
    nats: Nats = None,
    run: RunName = None,
) -> None:
    """Write TensorBoard event files."""

    async def make(handle: Run) -> tuple[Sink, Position]:
        from services.sinks.tensorboard import TensorBoard

        return TensorBoard(out / handle.name), _position(out, handle)

    _serve(make, run_file, sets, nats, run, extra="tensorboard")


@app.command()
def wandb(
    project: Project = "slipstream",
    offline: Offline = False,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where W&B keeps its files.")] = Path("wandb-sink"),
    run_file: OptionalRunFile = None,
    sets: Sets = None,
    nats: Nats = None,
    run: RunName = None,
) -> None:
    """Log to Weights & Biases. Its own variables hold: WANDB_API_KEY, WANDB_BASE_URL, WANDB_ENTITY."""

    async def make(handle: Run) -> tuple[Sink, Position]:
        from services.sinks.wandb import WeightsAndBiases

        config, position = (await handle.config()).model_dump(mode="json"), _position(out, handle)
        return await asyncio.to_thread(WeightsAndBiases, handle.name, config, out, project, offline), position

    _serve(make, run_file, sets, nats, run, extra="wandb")


@app.command()
def clearml(
    project: Project = "slipstream",
    offline: Offline = False,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where it keeps how far it came.")] = Path("clearml-sink"),
    run_file: OptionalRunFile = None,
    sets: Sets = None,
    nats: Nats = None,
    run: RunName = None,
) -> None:
    """Report to ClearML. Its own variables hold: CLEARML_API_HOST, CLEARML_API_ACCESS_KEY, CLEARML_API_SECRET_KEY."""

    async def make(handle: Run) -> tuple[Sink, Position]:
        from services.sinks.clearml import ClearMl

        config, position = (await handle.config()).model_dump(mode="json"), _position(out, handle)
        return await asyncio.to_thread(ClearMl, handle.name, config, project, offline), position

    _serve(make, run_file, sets, nats, run, extra="clearml")


@app.command()
def apprise(
    to: Annotated[list[str], typer.Option(metavar="URL", help="Whom to tell, as Apprise writes it; may be repeated.")],
    kind: Annotated[
        list[str] | None, typer.Option(help="Only events of this kind; may be repeated.", show_default=False)
    ] = None,
    run_file: OptionalRunFile = None,
    sets: Sets = None,
    nats: Nats = None,
    run: RunName = None,
) -> None:
    """Send notifications of what happens from now on: the run's end, failures, replicas that die."""

    async def make(handle: Run) -> tuple[Sink, Position]:
        from services.sinks.apprise import KINDS, Notifier
        from services.sinks.follow import Position

        return Notifier(handle.name, to, kind or KINDS), Position()

    _serve(make, run_file, sets, nats, run, extra="apprise", streams=("events",))


@app.command()
def prometheus(
    host: Annotated[str, typer.Option(help="Address to listen on; one that others reach asks for the token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port of /metrics; 0 for a free one.")] = 9464,
    run_file: OptionalRunFile = None,
    sets: Sets = None,
    nats: Nats = None,
    run: RunName = None,
) -> None:
    """Serve `/metrics` for Prometheus."""

    async def serve(handle: Run) -> None:
        from services.sinks.endpoint import serve_metrics

        await serve_metrics(handle, host, port, lambda url: typer.echo(f"metrics of {handle.name}: {url}/metrics"))

    _with_run(serve, run_file, sets, nats, run, extra="prometheus")


def _position(folder: Path, handle: Run) -> Position:
    from services.sinks.follow import Position

    return Position.load(folder / f"{handle.name}.position.json")


def _serve(make: Callable[[Run], Any], *which: Any, extra: str = "", streams: tuple[str, ...] = ()) -> None:
    """Follow the run into the sink that `make` gives."""

    async def follow(handle: Run) -> None:
        from services.sinks.follow import STREAMS, Follower

        sink, position = await make(handle)
        await Follower(handle, sink, position, streams or tuple(STREAMS)).follow()

    _with_run(follow, *which, extra=extra)


def _with_run(work: Callable[[Run], Any], run_file: Any, sets: Any, nats: Any, run: Any, *, extra: str = "") -> None:
    async def main() -> None:
        from shared.errors import BucketMissing

        deadline = asyncio.get_running_loop().time() + WAIT_S
        while True:  # a container of it may start before the run does
            try:
                async with open_run(run_file, sets, nats, run) as handle:
                    return await work(handle)
            except BucketMissing:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(1.0)

    with _told(extra):
        run_async(main)


@contextmanager
def _told(extra: str) -> Iterator[None]:
    """What a person can mend becomes one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise fail(f"this sink needs {error.name!r}: pip install 'slipstream-rl[{extra}]'", CONFIG) from error
    except (ValueError, OSError) as error:
        raise fail(str(error), CONFIG) from error
