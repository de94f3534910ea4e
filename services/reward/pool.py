"""A pool of scoring processes with hard deadlines and a limit to their memory.

Guarantees: one call at a time in a process; a call that exceeds its time is ended by SIGKILL of its process and costs only its
own sample, and time in which the pool itself stood still does not count (shared/awake.py); a process that holds too much memory
is replaced, between two calls or, if one call takes it all, in that call; whatever happens, the pool has as many processes as it
was asked for; a process that died without having been too slow is replaced and its sample tried once more, then given up with
kind `died`; no process outlives this one.
`tests/reward/test_pool.py` hangs, kills, crashes and bloats them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

import services
from services.reward.scoring import SHARED, FunctionError, Outcome, timed_out
from shared import awake
from shared.config import RunConfig

log = logging.getLogger(__name__)

PAGE = os.sysconf("SC_PAGE_SIZE")
LENGTH = struct.Struct("<I")
START_S = 120.0
"""For importing the functions: some bring a whole computer algebra system."""
GRACE_S = 0.5
"""On top of the time of a call, for the way there and back."""
TRIES = 2
"""Of a sample whose process dies."""
START_TRIES = 5
"""Of a process that something kills while it starts."""
WEIGH_S = 1.0
"""Between two looks at the memory."""
FULL_SHARE = 0.9
"""Of the limit: a process that holds more is replaced after its request, before a call runs into the limit."""


class Died(RuntimeError):
    """The process is gone, without having been too slow."""

    def __init__(self, how: str, killed: bool) -> None:
        super().__init__(how)
        self.killed = killed
        """By a signal, not by itself."""


@dataclass(frozen=True, slots=True)
class Job:
    """A group's samples. `shared` holds the context names of SHARED, each of `samples` the others."""

    shared: dict[str, Any]
    samples: list[dict[str, Any]]


@dataclass(slots=True)
class Worker:
    """One process. `needs` and `is_async` are what it told about each function."""

    process: asyncio.subprocess.Process
    needs: list[list[str]] = field(default_factory=list)
    is_async: list[bool] = field(default_factory=list)
    held_mb: int = 0
    """Its memory when it was last weighed."""
    guilt: str = ""
    """Why the pool killed it, or is about to replace it."""

    @classmethod
    async def start(cls, hello: dict[str, Any]) -> Worker:
        """Raises FunctionError if a function cannot be used, Died if something killed it meanwhile."""
        root = str(Path(services.__path__[0]).parent)
        search = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        worker = cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.reward.worker", str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the service, which drains
                env={**os.environ, "PYTHONPATH": search},
            )
        )
        try:
            await worker._hello(hello)
        except BaseException:
            await worker.kill()
            raise
        return worker

    async def _hello(self, hello: dict[str, Any]) -> None:
        try:
            async with awake.timeout(START_S):
                await self._send(hello)
                answer = await self._receive()
        except TimeoutError as error:
            raise FunctionError(f"reward.functions: importing them took longer than {START_S:.0f} s") from error
        except Died as error:
            if error.killed:
                raise
            raise FunctionError(f"reward.functions: importing them ended the process: {error}") from error
        if "failed" in answer:
            raise FunctionError(answer["failed"])
        self.needs, self.is_async = answer["needs"], answer["is_async"]

    async def ask(self, request: dict[str, Any], timeout_s: float) -> AsyncIterator[tuple[int, Outcome]]:
        """(sample, outcome) as they are done. Raises TimeoutError when nothing comes for so long, Died when nothing can."""
        async with awake.timeout(timeout_s):
            await self._send(request)
        for _ in request["samples"]:
            async with awake.timeout(timeout_s):
                answer = await self._receive()
            yield answer["sample"], Outcome(answer["score"], answer["kind"], answer["error"])

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()

    async def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        payload = msgpack.packb(message)
        try:
            self.process.stdin.write(LENGTH.pack(len(payload)) + payload)
            await self.process.stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise await self.death() from error

    async def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        try:
            head = await self.process.stdout.readexactly(LENGTH.size)
            return msgpack.unpackb(await self.process.stdout.readexactly(LENGTH.unpack(head)[0]))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self.death() from error

    async def death(self) -> Died:
        code = await self.process.wait()
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return Died(self.guilt or how, code < 0)


@dataclass(slots=True)
class Slot:
    """A place in the pool. Its process changes when it dies."""

    worker: Worker


class Pool:
    """`size` processes. Use as an async context; `score` may be called from any number of tasks."""

    def __init__(self, config: RunConfig, size: int | None = None) -> None:
        self.timeout_s, self.size = config.reward.timeout_s, size or config.reward.workers
        self.memory_mb = config.reward.memory_mb
        self.replaced: deque[str] = deque()
        """What became of processes, and why; whoever tells of it takes it out."""
        self.functions = len(config.reward.functions)
        self.kills = self.deaths = 0
        self._hello = {
            "base": config.base,
            "functions": [
                {"path": one.path, "options": one.options, "field": f"reward.functions[{number}]"}
                for number, one in enumerate(config.reward.functions)
            ],
        }
        self._idle: asyncio.Queue[Slot] = asyncio.Queue()
        self._slots: list[Slot] = []
        self._weighing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Pool:
        """Raises FunctionError if a function cannot be used."""
        starting = [self._start() for _ in range(self.size)]
        started = await asyncio.gather(*starting, return_exceptions=True)
        self._slots = [Slot(worker) for worker in started if isinstance(worker, Worker)]
        if failed := [error for error in started if isinstance(error, BaseException)]:
            await self.__aexit__()
            raise failed[0]
        for slot in self._slots:
            self._idle.put_nowait(slot)
        self._weighing = asyncio.create_task(self._weigh())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._weighing is not None:
            self._weighing.cancel()
            await asyncio.gather(self._weighing, return_exceptions=True)
        await asyncio.gather(*(slot.worker.kill() for slot in self._slots))

    @property
    def needs(self) -> set[str]:
        """The context names that any of the functions asks for."""
        return {name for slot in self._slots[:1] for names in slot.worker.needs for name in names}

    @property
    def pids(self) -> list[int]:
        """Of the processes that are alive."""
        return [slot.worker.process.pid for slot in self._slots if slot.worker.alive]

    async def score(self, job: Job) -> list[list[Outcome]]:
        """For each function the outcome of every sample. Waits for an idle process."""
        slot = await self._idle.get()
        try:
            return [await self._score(slot, function, job) for function in range(self.functions)]
        except BaseException:
            await slot.worker.kill()  # it may be in the middle of something
            raise
        finally:
            self._idle.put_nowait(slot)

    async def _score(self, slot: Slot, function: int, job: Job) -> list[Outcome]:
        """All samples by one function."""
        found: dict[int, Outcome] = {}
        deaths = [0] * len(job.samples)
        together = True
        while todo := [number for number in range(len(job.samples)) if number not in found]:
            await self._revive(slot)
            together = together and slot.worker.is_async[function]
            try:
                async for number, outcome in slot.worker.ask(
                    self._request(slot.worker, function, job, todo, together), self.timeout_s + GRACE_S
                ):
                    found[number] = outcome
                continue
            except TimeoutError:
                self.kills += 1
                outcome, limit = timed_out(self.timeout_s), 1
                slot.worker.guilt = outcome.error
            except Died as error:
                self.deaths += 1
                outcome, limit = Outcome(None, "died", f"ended its process: {error}"), TRIES
            await slot.worker.kill()
            if together:  # of those that ran side by side nobody knows whose fault it was
                together = False
                continue
            culprit = next(number for number in todo if number not in found)
            deaths[culprit] += 1
            if deaths[culprit] >= limit:
                found[culprit] = outcome
        await self._revive(slot)
        return [found[number] for number in range(len(job.samples))]

    def _request(self, worker: Worker, function: int, job: Job, todo: list[int], together: bool) -> dict[str, Any]:
        needs = worker.needs[function]
        return {
            "function": function,
            "together": together,
            "timeout_s": self.timeout_s,
            "shared": {name: job.shared[name] for name in needs if name in SHARED},
            "samples": [
                {"sample": number, **{name: job.samples[number][name] for name in needs if name in job.samples[number]}}
                for number in todo
            ],
        }

    async def _revive(self, slot: Slot) -> None:
        """A living process in the slot, with room to work."""
        dead = slot.worker
        if dead.alive:
            if dead.held_mb <= FULL_SHARE * self.memory_mb:
                return
            dead.guilt = self._too_much(dead)
            await dead.kill()
        why = await dead.death()
        slot.worker = await self._start()
        self.replaced.append(f"scoring process {dead.process.pid} was replaced by {slot.worker.process.pid}: {why}")

    async def _start(self) -> Worker:
        """Raises FunctionError if a function cannot be used."""
        for _ in range(START_TRIES):
            try:
                return await Worker.start(self._hello)
            except Died as error:
                how = str(error)
                log.warning("a scoring process was %s while it started", how)
        raise FunctionError(f"reward.functions: importing them ended the process {START_TRIES} times: {how}")

    async def _weigh(self) -> None:
        """For ever: see what the processes hold, and kill one that takes too much in the middle of a call."""
        while True:
            await asyncio.sleep(WEIGH_S)
            for worker in [slot.worker for slot in self._slots if slot.worker.alive]:
                worker.held_mb = memory(worker.process.pid) >> 20
                if worker.held_mb > self.memory_mb:
                    worker.guilt = self._too_much(worker)
                    worker.process.kill()

    def _too_much(self, worker: Worker) -> str:
        return f"it held {worker.held_mb} MB, reward.memory_mb is {self.memory_mb}"


def memory(pid: int) -> int:
    """Bytes that a process and its children hold; 0 if it is gone."""
    try:
        held = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError):
        return 0
    return held + sum(memory(int(child)) for child in children)
