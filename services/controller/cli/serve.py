"""`slipstream serve`: one service of a run, in this process."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from .common import CONFIG, fail


class Service(StrEnum):
    controller = "controller"
    dcs = "dcs"
    reference = "reference"
    reward = "reward"
    rollout = "rollout"
    teacher = "teacher"
    trainer = "trainer"


ROLES = {"reference": "services.rollout.stage", "teacher": "services.rollout.stage"}
"""Services that are a role of another one's package."""


def serve(
    service: Annotated[Service, typer.Argument(help="Which service.", show_default=False)],
    nats: Annotated[
        str, typer.Option(metavar="URL", envvar="SLIPSTREAM_NATS", help="The broker, as nats://host:port.")
    ],
    run: Annotated[str, typer.Option(metavar="NAME", envvar="SLIPSTREAM_RUN", help="The run's name.")],
    replica: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Name of this replica. Give the name of one that died to take its place."),
    ] = None,
    far: Annotated[
        bool,
        typer.Option(
            "--far",
            envvar="SLIPSTREAM_FAR",
            help="A rollout replica that the broadcast does not reach: it pulls snapshots or deltas.",
        ),
    ] = False,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Be one service of a run, until the run ends or SIGTERM asks to drain.

    All that it needs to know comes from the broker. More rollout replicas than `up` started? Start them, anywhere:

    `slipstream serve rollout --nats nats://10.0.0.5:4222 --run sort-letters`

    `slipstream serve rollout --nats nats://10.0.0.5:4222 --run sort-letters --replica rollout-1`

    A trainer over several hosts: `torchrun` starts the ranks, and rank 0 speaks to the broker.

    `SLIPSTREAM_NATS=... SLIPSTREAM_RUN=... torchrun --nnodes 2 --nproc-per-node 8 ... -m services.controller.cli serve trainer`

    Exit codes: 0 drained or the run is over, 1 failed, 2 config, 3 broker, 4 another one is active.
    """
    import os
    from importlib import import_module

    from shared.parent import die_with_parent

    if far:
        os.environ["SLIPSTREAM_FAR"] = "1"  # read where weights are received
    if parent is not None:
        die_with_parent(parent)
    try:
        if service is Service.trainer and int(os.environ.get("RANK", "0")) > 0:
            raise typer.Exit(import_module("services.trainer.follower").main())
        module = import_module(ROLES.get(service.value, f"services.{service.value}.main"))
    except ModuleNotFoundError as error:
        extra = "rollout" if service.value in ROLES else service.value
        text = f"the {service.value} service needs {error.name!r}: pip install 'slipstream-rl[{extra}]'"
        raise fail(text, CONFIG) from error
    from shared.service import run_service

    raise typer.Exit(run_service(service.value, module.main, nats_url=nats, run=run, replica=replica))
