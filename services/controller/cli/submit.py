"""`slipstream submit`: a run for services that are started elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import RunFile, Sets, run_async


def submit(
    run_file: RunFile,
    nats: Annotated[
        str, typer.Option("--nats", metavar="URL", envvar="SLIPSTREAM_NATS", help="The broker, as nats://host:port.")
    ],
    sets: Sets = None,
) -> None:
    """Make a run known at a broker, for services that containers or a cluster start: they wait for it, in any order.

    Builds the model where `model.path` is, if `model.build` says how. Submitting a run again goes on with it where it stopped;
    a finished one stays finished unless `steps` was raised.

    `slipstream submit run.yaml --nats nats://10.0.0.5:4222`

    `slipstream submit run.yaml --nats nats://10.0.0.5:4222 --set steps=500`

    Exit codes: 0 it is known, 2 config, 3 broker.
    """

    async def tell() -> str:
        from services.controller.attach import attach
        from services.controller.launchers.model import ensure_model
        from services.controller.launchers.resume import register
        from shared import config as run_config
        from shared.columns import stages

        config = run_config.load(run_file, sets)
        config.broker.url = nats
        async with attach(nats, config.run, create=True, replicas=config.broker.replicas) as run:
            await ensure_model(config)  # services wait for the config, which comes after it
            before = await register(run, config)
        if before.finished(config.steps):
            return f"the run {config.run!r} is finished; raise `steps` to go on with it, or take another name"
        verb = "goes on" if before.state else "is known"
        known = f"the run {config.run!r} {verb}: {config.steps} steps, staleness at most {config.max_staleness}"
        return known + "".join(f"\nit also needs the service {role!r}" for role in stages(config))

    typer.echo(run_async(tell))
