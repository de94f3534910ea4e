"""What the commands share: options, how an error becomes a line and an exit code, and how a run is found.

Imports only typer at the top: the rest is loaded by the command that needs it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from services.controller.attach import Run

T = TypeVar("T")

FAILED, CONFIG, BROKER, STOPPED = 1, 2, 3, 130
"""Exit codes: it failed, the command or config is wrong, no usable broker, Ctrl-C."""

RunFile = Annotated[Path, typer.Argument(help="The run file (YAML).", show_default=False)]
OptionalRunFile = Annotated[
    Path | None,
    typer.Argument(
        help="The run file, if its broker is the private one. Otherwise give --nats and --run.", show_default=False
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="a.b=value", help="Override a field of the run file; may be repeated.", show_default=False
    ),
]
Nats = Annotated[
    str | None,
    typer.Option(
        "--nats", metavar="URL", envvar="SLIPSTREAM_NATS", help="The broker, as nats://host:port.", show_default=False
    ),
]
RunName = Annotated[
    str | None,
    typer.Option(
        "--run", metavar="NAME", envvar="SLIPSTREAM_RUN", help="The run's name at that broker.", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line, for programs.")]


def fail(text: str, code: int) -> typer.Exit:
    """Say what is wrong on standard error; raise what this returns."""
    print(f"slipstream: {text}", file=sys.stderr, flush=True)
    return typer.Exit(code)


def run_async(function: Callable[[], Awaitable[T]]) -> T:
    """Run a command's coroutine. What a person can mend becomes one line and an exit code, not a traceback."""
    from shared.broker import BrokerError
    from shared.config import ConfigError
    from shared.errors import BrokerUnavailable, BucketMissing, NotJetStream, TransportError

    logging.basicConfig(level=os.environ.get("SLIPSTREAM_LOG", "ERROR"), format="%(levelname)s %(message)s")

    async def call() -> T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, task.cancel
        )  # a broker that was started must be stopped
        return await function()

    try:
        return asyncio.run(call())
    except (ConfigError, BucketMissing) as error:
        raise fail(str(error), CONFIG) from error
    except (BrokerUnavailable, NotJetStream, BrokerError) as error:
        raise fail(str(error), BROKER) from error
    except TransportError as error:
        raise fail(str(error), FAILED) from error
    except (KeyboardInterrupt, asyncio.CancelledError, BrokenPipeError) as error:
        raise typer.Exit(STOPPED) from error


@asynccontextmanager
async def open_run(
    run_file: Path | None, sets: list[str] | None, nats: str | None, name: str | None
) -> AsyncIterator[Run]:
    """The run that the command line names: by its file, or by broker and name."""
    from services.controller.attach import attach
    from services.controller.launchers.broker import serving
    from shared import config as run_config
    from shared.config import ConfigError

    if run_file is not None:
        config = run_config.load(run_file, sets)
        if nats:
            config.broker.url = nats
        async with serving(config) as url, attach(url, name or config.run) as run:
            yield run
    elif nats and name:
        async with attach(nats, name) as run:
            yield run
    else:
        raise ConfigError("which run? Give its run file, or --nats URL and --run NAME")


def plain(record: Any) -> Any:
    """A record as values that JSON has: arrays become lists, bytes their length."""
    import dataclasses

    import numpy as np

    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: plain(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, dict):
        return {str(key): plain(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [plain(value) for value in record]
    if isinstance(record, np.ndarray | np.generic):
        return record.tolist()
    return f"{len(record)} bytes" if isinstance(record, bytes) else record


def print_json(value: Any) -> None:
    """One line. Not-a-number becomes null: it is no JSON."""
    import json
    import math

    def clean(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: clean(entry) for key, entry in item.items()}
        if isinstance(item, list):
            return [clean(entry) for entry in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    print(json.dumps(clean(plain(value)), ensure_ascii=False), flush=True)
