"""`slipstream up` whose trainer comes by torchrun: `python -m tests.e2e.up_with_torchrun RUN.yaml RANKS REPORT [a.b=value]`."""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from rich.console import Console

from services.controller.cli.common import run_async
from services.controller.launchers.local import Command, serve_command
from services.controller.launchers.up import Options, up


def main(run_file: Path, ranks: int, report: Path, sets: list[str]) -> None:
    def command(url: str, run: str) -> Command:
        plain = serve_command(url, run)

        def argv(service: str, replica: str) -> list[str]:
            if service != "trainer":
                return plain(service, replica)
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            named = [
                "env",
                f"SLIPSTREAM_NATS={url}",
                f"SLIPSTREAM_RUN={run}",
            ]  # torchrun takes --run for one of its own
            serve = ["serve", "trainer", "--replica", replica]
            return [*named, sys.executable, *launcher, "-m", "services.controller.cli", *serve]

        return argv

    chosen = Options(run_file, sets, report, command=command)
    raise typer.Exit(run_async(lambda: up(chosen, Console(width=120))))


if __name__ == "__main__":
    typer.run(main)
