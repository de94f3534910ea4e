"""`slipstream`: one small file a command. `main` is the entry point of the installed script.

Nothing heavy is imported before a command needs it: `slipstream --help` answers in a fraction of a second
(`tests/e2e/test_cli.py` looks at what is loaded). Exit codes are those of `shared/service.py`.
"""

from __future__ import annotations

import typer

from . import audit, broker, events, export, scale, serve, sink, status, submit, up, validate, watch, weights

app = typer.Typer(
    name="slipstream",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""Post-train language models with reinforcement learning, as services over a durable broker.

Start here:

`slipstream validate run.yaml` checks a run file without a GPU

`slipstream up run.yaml` runs it on this machine; the same command resumes it

`slipstream audit run.yaml` proves that nothing was lost, trained twice or trained too stale
""",
)
for command in (up, submit, validate, status, watch, events, audit, scale, export, serve):
    name = command.__name__.rpartition(".")[2]
    app.command(name)(getattr(command, name))
app.add_typer(sink.app, name="sink")
app.add_typer(broker.app, name="broker")
app.add_typer(weights.app, name="weights")


def main() -> None:
    app(prog_name="slipstream")
