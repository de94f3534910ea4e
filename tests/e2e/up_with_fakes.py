"""`slipstream up` with stand-ins for the services: `python -m tests.e2e.up_with_fakes RUN.yaml [a.b=value]...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.controller.cli.common import run_async
from services.controller.launchers.up import Options, up


def command(url: str, run: str):
    def argv(service: str, replica: str) -> list[str]:
        options = ["--nats", url, "--run", run, "--replica", replica, "--parent", str(os.getpid())]
        return [sys.executable, "-m", "tests.e2e.fake_service", service, *options]

    return argv


def main(run_file: Path, sets: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    chosen = Options(run_file, sets or [], command=command)
    raise typer.Exit(run_async(lambda: up(chosen, Console(width=120))))


if __name__ == "__main__":
    typer.run(main)
