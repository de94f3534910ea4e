"""`slipstream up`: the whole run on this machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .common import Nats, RunFile, Sets, run_async


class Launcher(StrEnum):
    local = "local"
    ray = "ray"


def up(
    run_file: RunFile,
    sets: Sets = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the report here (it always goes to WORKDIR/report.json)."),
    ] = None,
    nats: Nats = None,
    keep_broker: Annotated[
        bool, typer.Option("--keep-broker", help="Leave the private broker running afterwards.")
    ] = False,
    launcher: Annotated[
        Launcher, typer.Option(help="Services as processes of this machine, or as actors of a Ray cluster.")
    ] = Launcher.local,
    address: Annotated[
        str, typer.Option(help="The Ray cluster: auto, local (one made for this run), or host:port.")
    ] = "auto",
) -> None:
    """Run a run file on this machine: broker, services, live view, report.

    Builds the model if `model.build` says how, starts a private broker unless `broker.url` or `--nats` names one, starts every
    service as a process of its own and waits for the end. Ctrl-C lets the services finish what they hold; the same command goes
    on from there. A second Ctrl-C kills.

    `slipstream up examples/sort_letters/run.yaml`

    `slipstream up run.yaml --set run=try2 --set trainer.optimizer.lr=3e-4 --report report.json`

    `slipstream up run.yaml --nats nats://10.0.0.5:4222`

    `slipstream up run.yaml --nats nats://10.0.0.5:4222 --launcher ray --address 10.0.0.6:6379`

    Exit codes: 0 finished, 1 failed or the audit found a fault, 2 config, 3 broker, 130 stopped.
    """
    import sys

    from rich.console import Console

    from services.controller.launchers.up import Options
    from services.controller.launchers.up import up as run_up

    options = Options(run_file, sets or [], report, nats, keep_broker, launcher.value, address)
    console = Console(soft_wrap=not sys.stdout.isatty())  # a log file has no width
    raise typer.Exit(run_async(lambda: run_up(options, console)))
