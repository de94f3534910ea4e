"""`slipstream broker init`: a broker for real use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import CONFIG, fail

app = typer.Typer(help="Set up a broker for real use.", no_args_is_help=True, rich_markup_mode="markdown")

Names = list[str] | None


@app.callback()
def broker() -> None:
    """Set up a broker for real use."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Where keys and configuration go.", show_default=False)],
    run: Annotated[
        Names, typer.Option("--run", metavar="NAME", help="A run that the keys are good for; may be repeated.")
    ] = None,
    host: Annotated[
        Names,
        typer.Option(
            "--host",
            metavar="NAME",
            help="A node, by the name that others reach it under: one, or three for a cluster.",
        ),
    ] = None,
    also: Annotated[
        Names,
        typer.Option("--also", metavar="NAME", help="A further name or address of the nodes, for the certificates."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Where a node keeps its streams (/data at first).", show_default=False),
    ] = None,
    mounted_at: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Where a node sees its folder, if not where it is.", show_default=False),
    ] = None,
    port: Annotated[int | None, typer.Option(help="For clients (4222 at first).", show_default=False)] = None,
    days: Annotated[
        int | None, typer.Option(help="Of the nodes' certificates (365 at first).", show_default=False)
    ] = None,
) -> None:
    """Make keys, permissions, certificates and nats-server's configuration, one folder a node and one a role.

    Running it again keeps every key, adds the runs and names that are new, and renews certificates that run out within a month.

    `slipstream broker init secrets --run sort-letters --host broker.example.org --store /var/lib/nats`

    `slipstream broker init secrets --run try2`

    `slipstream broker init secrets --run big --host n1 --host n2 --host n3`

    Then `nats-server -c secrets/nodes/HOST/server.conf` on each node, and SLIPSTREAM_CREDENTIALS=secrets/clients/ROLE for
    each service. Exit codes: 0 done, 2 something is wrong.
    """
    from shared.config import ConfigError

    try:
        from services.controller.broker_setup import folder as setup
    except ModuleNotFoundError as error:
        raise fail(f"broker init needs {error.name!r}: pip install 'slipstream-rl[broker]'", CONFIG) from error
    try:
        plan = setup.extend(
            setup.read_plan(folder),
            run or [],
            host or [],
            also or [],
            store=store,
            mounted_at=mounted_at,
            port=port,
            days=days,
        )
        news = setup.write(folder, plan)
    except ConfigError as error:
        raise fail(str(error), CONFIG) from error
    for line in news or ["everything is there already"]:
        typer.echo(line)
    typer.echo(f"runs: {', '.join(plan.runs)}")
