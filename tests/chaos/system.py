"""The example run as real processes, and the means to harm it: which process plays which part, now."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from services.controller.attach import Run, attach
from services.controller.launchers.broker import read_address
from services.dcs import snapshots
from shared import wire
from shared.records import Event, Receipt
from tests.processes import children, is_broker, replicas
from tests.shared.runs import until

EXAMPLE = Path(__file__).parents[2] / "examples/sort_letters/run.yaml"
ROOT = EXAMPLE.parents[2]
INSIDE_FOLDER = Path(__file__).with_name("inside")
DEADLINE_S = 900.0
INSIDE = {"engine": "rollout-0", "scorer": "reward-0"}
"""Processes that services start themselves, and whose child to look for."""


class System:
    """`slipstream up` on the example in a folder of its own. Use as an async context: nothing is left behind.

    `spoilt` are variables of tests/chaos/inside/sitecustomize.py, which then runs in every process.
    """

    def __init__(self, folder: Path, *sets: str, spoilt: dict[str, str] | None = None) -> None:
        self.folder, self.sets = folder, list(sets)
        path = [str(ROOT)] if spoilt is None else [str(INSIDE_FOLDER), str(ROOT)]
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **(spoilt or {})}
        self.workdir = folder / "runs/sort-letters"
        self.output = folder / "output.txt"
        self.up: Process | None = None
        folder.mkdir(parents=True, exist_ok=True)

    async def __aenter__(self) -> System:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self.up is not None and self.up.returncode is None:
            self.up.send_signal(signal.SIGKILL)
            await self.up.wait()
        address = read_address(self.workdir / "broker.json")
        if address is not None and is_broker(address.pid):
            with suppress(ProcessLookupError):
                os.kill(address.pid, signal.SIGKILL)

    async def start(self) -> None:
        """The command, for the first time or again."""
        sets = [part for value in self.sets for part in ("--set", value)]
        self.up = await self.cli("up", str(EXAMPLE), *sets, "--report", str(self.folder / "report.json"))

    async def cli(self, *arguments: str, stdout: int | None = None) -> Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.controller.cli", *arguments),
            cwd=self.folder,
            env=self.environment,
            stdin=DEVNULL,
            stdout=self.output.open("ab") if stdout is None else stdout,
            stderr=self.output.open("ab"),
        )

    async def ends(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait for the end; the report."""
        assert self.up is not None
        async with asyncio.timeout(deadline_s):
            code = await self.up.wait()
        assert code == 0, f"exit code {code}\n{self.text[-6000:]}"
        return self.report()

    async def events(self, *options: str) -> list[dict[str, Any]]:
        """What `slipstream events` lists of the run, also of a finished one."""
        sets = [part for value in self.sets for part in ("--set", value)]
        process = await self.cli("events", str(EXAMPLE), *sets, "--json", *options, stdout=PIPE)
        async with asyncio.timeout(DEADLINE_S):
            output, _ = await process.communicate()
        assert process.returncode == 0
        return [json.loads(line) for line in output.splitlines()]

    async def stops(self) -> dict[str, Any]:
        """Ctrl-C; the report of what was done."""
        assert self.up is not None
        self.up.send_signal(signal.SIGINT)
        async with asyncio.timeout(DEADLINE_S):
            assert await self.up.wait() == 130, self.text[-6000:]
        return self.report()

    async def says(self, words: str) -> None:
        await until(lambda: words in self.text or not self.running, f"up says {words!r}", DEADLINE_S)
        assert words in self.text, self.text[-6000:]

    async def happens(self, run: Run, kind: str, replica: str) -> None:
        """Until such an event is on record. (Of many at once `up` prints the last ones only.)"""

        async def told() -> bool:
            events = [wire.decode(data, Event) async for data, _ in run.queue.read("events")]
            return not self.running or any((event.kind, event.replica) == (kind, replica) for event in events)

        await until(told, f"{kind} of {replica}", DEADLINE_S)
        assert self.running, self.text[-6000:]

    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "report.json").read_text())

    @property
    def running(self) -> bool:
        return self.up is not None and self.up.returncode is None

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @asynccontextmanager
    async def attached(self) -> AsyncIterator[Run]:
        file = self.workdir / "broker.json"
        await until(lambda: read_address(file) or not self.running, "the private broker is up", DEADLINE_S)
        address = read_address(file)
        assert address is not None, self.text
        async with attach(address.url, "sort-letters", create=True) as run:
            await until(run.state, "the run is set up", DEADLINE_S)
            yield run

    async def trains(self, run: Run, groups: int, by: str = "") -> None:
        """Until so many groups more are trained, or so many that the replica `by` drew."""
        last = await run.queue.last(run.subjects.receipts)

        async def follow() -> None:
            left = groups
            async for message, _ in run.queue.read("receipts", start_seq=last[1] + 1 if last else 1, live=True):
                receipt = wire.decode(message, Receipt)
                left -= receipt.kind == "trained" and by in ("", receipt.replica)
                if left <= 0:
                    return

        reading = asyncio.create_task(follow())
        try:
            await until(lambda: reading.done() or not self.running, f"{groups} groups more are trained", DEADLINE_S)
            assert reading.done(), f"the run ended first\n{self.text[-6000:]}"
            reading.result()
        finally:
            reading.cancel()

    async def first_weights(self, target: Path) -> Path:
        """The weights before the first step, as a model folder for other runs: copied as soon as they are there."""
        folder = self.workdir / "snapshots"
        await until(lambda: snapshots.versions(folder), "the first weights are published", DEADLINE_S)
        first = min(snapshots.versions(folder))
        manifest = snapshots.read(folder, first)
        assert manifest is not None
        assert manifest.step == 0
        shutil.copytree(snapshots.folder(folder, first), target)
        return target

    # -- processes ----------------------------------------------------------------------------------------------------

    def pid(self, part: str) -> int | None:
        """Of a replica, `broker`, `up`, `engine` or `scorer`; None while there is no such process."""
        if part == "up":
            return self.up.pid if self.running and self.up is not None else None
        if part == "broker":
            address = read_address(self.workdir / "broker.json")
            return address.pid if address is not None and is_broker(address.pid) else None
        if not self.running or self.up is None:
            return None
        pid = replicas(self.up.pid).get(INSIDE.get(part, part))
        if pid is None or part not in INSIDE:
            return pid
        inside = children(pid)
        return inside[0].pid if inside else None

    async def kill(self, part: str, number: signal.Signals = signal.SIGKILL) -> int | None:
        """Signal it as soon as it is there. None: the run ended first."""
        began = time.monotonic()
        while self.running:
            if (pid := self.pid(part)) is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                    return pid
            assert time.monotonic() - began < DEADLINE_S, f"no process plays {part}"
            await asyncio.sleep(0.02)
        return None
