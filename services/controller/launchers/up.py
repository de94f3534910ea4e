"""`slipstream up`: a whole run on this machine, from the run file to the report. The steps stand in `_run`, in order.

Guarantees: one `up` a workdir; the same command goes on with a run that was stopped or killed; whatever ends it, no service and
no half-written file stays. Exit codes: 0 finished, 1 failed (or the audit found a fault), 2 config, 3 broker, 130 stopped.
`tests/e2e/test_up.py` runs it with real processes.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from services.controller import report
from services.controller.attach import Run, attach
from services.controller.evidence import gather
from services.controller.launchers.broker import PrivateBroker
from services.controller.launchers.launcher import Launcher
from services.controller.launchers.local import Command, LocalLauncher, serve_command
from services.controller.launchers.model import ensure_model
from services.controller.launchers.resume import register
from services.controller.launchers.session import BROKER_LOST, Interrupts, Outcome, Session
from services.dcs import segments
from shared import config as run_config
from shared.config import ConfigError, RunConfig

STOP_ORDER = (("rollout", "reward", "teacher", "reference", "trainer"), ("dcs", "controller"))
DRAIN_MARGIN_S = 10.0
"""Given to the children on top of drain_timeout_s before they are killed."""


@dataclass(slots=True, frozen=True)
class Options:
    """The command line of `up`."""

    run_file: Path
    sets: list[str] = field(default_factory=list)
    report: Path | None = None
    nats: str | None = None
    keep_broker: bool = False
    launcher: str = "local"
    """local | ray"""
    address: str = "auto"
    """Of the Ray cluster: auto, local (one of its own), or host:port."""
    command: Callable[[str, str], Command] = serve_command
    """(broker's URL, run) -> what starts a service; tests put stand-ins here."""


async def up(options: Options, console: Console) -> int:
    """Run it. Returns the exit code; raises ConfigError, BrokerError or TransportError before anything was started."""
    config = run_config.load(options.run_file, options.sets)
    if options.nats:
        config.broker.url = options.nats
    interrupts = listen()
    with only_one(config.work_path):
        if await ensure_model(config):
            console.print(f"built the model in {config.path(config.model.path)}", highlight=False)
        async with the_broker(config, options.keep_broker, console) as (url, broker):
            async with attach(url, config.run, create=True, replicas=config.broker.replicas) as run:
                return await _run(config, run, broker, options, interrupts, console)


async def _run(
    config: RunConfig,
    run: Run,
    broker: PrivateBroker | None,
    options: Options,
    interrupts: Interrupts,
    console: Console,
) -> int:
    before = await register(run, config)
    if before.finished(config.steps):
        console.print(f"the run {config.run!r} is finished; raise `steps` to go on with it, or take another name")
        return await _report(run, options, config, console, Outcome("finished", 0))
    launcher = await the_launcher(config, run, options)
    session = Session(config, run, launcher, broker, interrupts, console)
    try:
        await session.start()
        greet(config, run, before.state, console)
        outcome = await session.wait()
        session.view.phase = outcome.kind
        await drain(session, outcome, console)
        if outcome.code != BROKER_LOST:
            await session.catch_up()
    finally:
        await session.close()
        launcher.signal(signal.SIGKILL)  # nothing is left unless the lines above raised
        await launcher.close()
        segments.sweep(segments.prefix(config.run, config.workdir))  # of a trainer that was killed at the end
    if outcome.code == BROKER_LOST:  # and with it everything that a report could be made of
        console.print(outcome.why, markup=False, highlight=False)
        return BROKER_LOST
    return await _report(run, options, config, console, outcome)


async def the_launcher(config: RunConfig, run: Run, options: Options) -> Launcher:
    """Raises ConfigError if there is no Ray, or no such cluster."""
    if config.colocated and options.launcher != "local":
        raise ConfigError(
            f"placement: colocate needs trainer and rollouts on one host, which --launcher {options.launcher} does not promise; "
            "leave --launcher out, or use placement: separate"
        )
    if options.launcher == "local":
        return LocalLauncher(options.command(run.url, config.run), config.work_path / "logs")
    try:
        from services.controller.launchers.ray import RayLauncher
    except ModuleNotFoundError as error:
        raise ConfigError(f"--launcher ray needs {error.name!r}: pip install 'slipstream-rl[ray]'") from error
    return await RayLauncher.connect(config, run.url, options.address)


async def drain(session: Session, outcome: Outcome, console: Console) -> None:
    """Let every service finish what it holds, and put a failure on record. A (second) Ctrl-C ends the waiting."""
    if outcome.kind == "stopped":
        console.print("stopping: services finish what they hold; Ctrl-C again kills them", highlight=False)
    stop = asyncio.create_task(_stop_in_order(session, outcome))
    hurry = session.interrupts.second if outcome.kind == "stopped" else session.interrupts.first
    impatient = asyncio.create_task(hurry.wait())
    await asyncio.wait({stop, impatient}, return_when=asyncio.FIRST_COMPLETED)
    if not stop.done():
        session.launcher.signal(signal.SIGKILL)
    impatient.cancel()
    if late := await stop:
        console.print(f"did not drain in time and were killed: {', '.join(late)}", highlight=False)


async def _stop_in_order(session: Session, outcome: Outcome) -> list[str]:
    """Those first that may need others to finish what they hold. Returns whom it had to kill."""
    late = []
    for services in STOP_ORDER:
        late += await session.launcher.stop(session.config.drain_timeout_s + DRAIN_MARGIN_S, services)
        if (
            outcome.kind == "failed" and outcome.code != BROKER_LOST
        ):  # tells replicas elsewhere; now, as the DCS leaves on it too
            await session.run.set_state(f"failed:{outcome.why}")
    return late


async def _report(run: Run, options: Options, config: RunConfig, console: Console, outcome: Outcome) -> int:
    """Write the report and say how it went. A finished run whose books do not balance has failed."""
    built = report.build(await gather(run.queue, run.kv, with_metrics=True))
    files = [config.work_path / "report.json", *([options.report] if options.report else [])]
    for file in files:
        await asyncio.to_thread(report.write, file, built)
    for line in summary(built, outcome, options):
        console.print(line, markup=False, highlight=False)
    console.print(f"report: {files[-1]}", markup=False, highlight=False)
    if outcome.kind == "finished" and not (built["balanced"] and not built["faults"]):
        return 1
    return outcome.code


def summary(built: dict[str, Any], outcome: Outcome, options: Options) -> list[str]:
    """What a person wants to know at the end."""
    lines = [f"{outcome.kind} after {built['steps']} steps" + (f": {outcome.why}" if outcome.why else "")]
    if (window := built["reward_window"]) > 0:
        lines.append(
            f"reward {built['reward_first']:.3f} -> {built['reward_last']:.3f} (mean of the last {window} steps)"
        )
        lines.append(f"oldest trained token {built['staleness_max']} steps, bound {built['staleness_bound']}")
    if turns := built.get("turns"):
        told = [
            f"{service} {found.get('sleeps', 0):.0f} sleeps, {found.get('wakes', 0):.0f} wakes"
            for service, found in turns.items()
        ]
        lines.append(f"turns on the shared device: {'; '.join(told)}")
    if (before := built["evaluation"]["before"]) is not None:
        after = built["evaluation"]["after"]
        lines.append(f"held-out reward {before:.3f}" + (f" -> {after:.3f}" if after is not None else ""))
    dropped = " ".join(f"{reason} {count}" for reason, count in built["dropped"].items()) or 0
    lines.append(
        f"issued {built['issued']} = trained {built['trained']} + dropped {dropped} + pending {built['pending']}"
    )
    if built["faults"]:
        lines.append(f"the audit found {len(built['faults'])} faults: slipstream audit {options.run_file}")
    if outcome.kind == "stopped":
        lines.append("the same command goes on where it stopped")
    elif outcome.kind == "failed":
        lines.append("once the cause is mended, the same command goes on where it stopped")
    return lines


def greet(config: RunConfig, run: Run, state: str, console: Console) -> None:
    verb = "going on with" if state else "started"
    console.print(
        f"{verb} run {config.run!r}: {config.steps} steps, staleness at most {config.max_staleness}; broker {run.url}; "
        f"logs {config.work_path / 'logs'}\nwatch it from elsewhere: slipstream watch --nats {run.url} --run {config.run}",
        highlight=False,
    )


def listen() -> Interrupts:
    """Ctrl-C, `kill` and a closed terminal all ask for draining; the second time, for an end."""
    interrupts = Interrupts()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup means what it says
            loop.add_signal_handler(number, interrupts.strike)
    return interrupts


@contextmanager
def only_one(workdir: Path) -> Iterator[None]:
    """Hold the workdir. Raises ConfigError if another `up` has it."""
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / "up.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise ConfigError(
                f"{workdir} is in use by another `slipstream up` (pid {holder}); stop that one, or start this run under another "
                "name (--set run=NAME)"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


@asynccontextmanager
async def the_broker(
    config: RunConfig, keep: bool, console: Console
) -> AsyncIterator[tuple[str, PrivateBroker | None]]:
    """(address, private broker if it is ours). Raises BrokerError."""
    if config.broker.url:
        yield config.broker.url, None
        return
    broker = await asyncio.to_thread(PrivateBroker(config.work_path, config.broker).start)
    try:
        yield broker.url, broker
    finally:
        if keep:
            console.print(f"the broker stays at {broker.url}; end it with: kill {broker.pid}", highlight=False)
        else:
            await asyncio.to_thread(broker.stop)
