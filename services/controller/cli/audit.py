"""`slipstream audit`: the proof, from the streams alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from .common import FAILED, AsJson, Nats, OptionalRunFile, RunName, Sets, open_run, plain, print_json, run_async

if TYPE_CHECKING:
    from services.controller.audit import Audit

FAULTS_SHOWN = 10


def audit(
    run_file: OptionalRunFile = None, sets: Sets = None, nats: Nats = None, run: RunName = None, json: AsJson = False
) -> None:
    """Prove a run from its streams: nothing lost, nothing trained twice, no token too stale, no unverified weights.

    Every group was issued once and has one fate: trained, dropped with a reason, or still pending. Ages are counted again from
    the trajectories and the announcements, not taken from the trainer's word. Works while the run goes on, and after it.

    `slipstream audit run.yaml`

    `slipstream audit --nats nats://10.0.0.5:4222 --run sort-letters --json`

    Exit codes: 0 all holds, 1 a fault (its ids are shown), 2 config, 3 broker.
    """

    async def look() -> Audit:
        from services.controller.audit import audit as held
        from services.controller.evidence import gather

        async with open_run(run_file, sets, nats, run) as handle:
            return held(await gather(handle.queue, handle.kv))

    result = run_async(look)
    if json:
        print_json({"ok": result.ok, **plain(result)})
    else:
        show(result)
    if not result.ok:
        raise typer.Exit(FAILED)


def show(result: Audit) -> None:
    """The books, then the checks, then the first offending ids of each that failed."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    dropped = " ".join(f"{reason} {count}" for reason, count in sorted(result.dropped.items())) or "0"
    console.print(
        f"issued {result.issued} = trained {result.trained} + dropped {dropped} + pending {result.pending}",
        markup=False,
    )
    console.print(
        "age of trained samples: " + (" ".join(f"{age}:{count}" for age, count in result.ages.items()) or "none"),
        markup=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("check", "looked at", "faults", ""):
        table.add_column(name, justify="left" if name in ("check", "") else "right")
    for check in result.checks:
        verdict = f"[red]{len(check.faults)}[/]" if check.faults else "[green]0[/]"
        table.add_row(check.name, str(check.looked_at), verdict, check.note)
    console.print(table)
    for check in result.checks:
        for fault in check.faults[:FAULTS_SHOWN]:
            console.print(f"{check.name}: {fault.subject}: {fault.message}", markup=False, style="red")
        if len(check.faults) > FAULTS_SHOWN:
            console.print(f"{check.name}: and {len(check.faults) - FAULTS_SHOWN} more", style="red")
    console.print("all holds" if result.ok else "FAULTS FOUND", style="bold green" if result.ok else "bold red")
