"""`slipstream validate`: what can be known before a run starts."""

from __future__ import annotations

import typer

from .common import CONFIG, RunFile, Sets, fail, run_async


def validate(run_file: RunFile, sets: Sets = None) -> None:
    """Check a run file completely, without a GPU and without starting anything.

    Fields, types and combinations; that every function can be imported and called as it will be; that the first prompts can be
    read; that the model is one that can be trained or can be built. Prints what the run comes down to.

    `slipstream validate examples/sort_letters/run.yaml`

    `slipstream validate run.yaml --set max_staleness=0`

    Exit codes: 0 nothing found, 2 something is wrong.
    """

    async def check() -> tuple[dict[str, str], list[str]]:
        from services.controller.check_run import key_facts, problems
        from shared import config as run_config

        config = run_config.load(run_file, sets)
        return key_facts(config), problems(config)

    facts, found = run_async(check)
    if found:
        lines = "\n".join(f"  {line}" for line in found)
        raise fail(f"{run_file} is a valid run file, but the run could not start:\n{lines}", CONFIG)
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {value}")
    typer.echo(f"{run_file}: nothing wrong")
