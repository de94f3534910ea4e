"""`slipstream up` whose trainer's ranks come by torchrun or from a Ray cluster:
`python -m tests.e2e.up_with_ranks RUN.yaml torchrun|ray RANKS REPORT [a.b=value]`."""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from rich.console import Console

from services.controller.cli.common import run_async
from services.controller.launchers.local import Command, serve_command
from services.controller.launchers.up import Options, up
from tests.tied import tied


def main(run_file: Path, way: str, ranks: int, report: Path, sets: list[str]) -> None:
    def command(url: str, run: str) -> Command:
        plain = serve_command(url, run)

        def argv(service: str, replica: str) -> list[str]:
            if service != "trainer":
                return plain(service, replica)
            # torchrun takes --run for one of its own.
            named = tied("env", f"SLIPSTREAM_NATS={url}", f"SLIPSTREAM_RUN={run}", sys.executable, "-m")
            if way == "ray":
                group = ["--ranks", str(ranks), "--address", "local", "--cpus", "0.5"]
                service = ["--nats", url, "--run", run, "--replica", replica]
                return [*named, "services.trainer.ray_ranks", *group, "--", *service]
            launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            return [*named, *launcher, "-m", "services.controller.cli", "serve", "trainer", "--replica", replica]

        return argv

    chosen = Options(run_file, sets, report, command=command)
    raise typer.Exit(run_async(lambda: up(chosen, Console(width=120))))


if __name__ == "__main__":
    typer.run(main)
