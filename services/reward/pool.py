"""A pool of scoring processes with hard deadlines.

Guarantees: one call at a time in a process; a call that exceeds its time is ended by SIGKILL of its process and costs only its
own sample; whatever happens, the pool has as many processes as it was asked for; a process that died without having been too
slow is replaced and its sample tried once more, then given up with kind `died`; no process outlives this one.
`tests/reward/test_pool.py` hangs, kills and crashes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

import services
from services.reward.scoring import SHARED, FunctionError, Outcome, timed_out
from shared.config import RunConfig

log = logging.getLogger(__name__)

LENGTH = struct.Struct("<I")
START_S = 120.0
"""For importing the functions: some bring a whole computer algebra system."""
GRACE_S = 0.5
"""On top of the time of a call, for the way there and back."""
TRIES = 2
"""Of a sample whose process dies."""


class Died(RuntimeError):
    """The process is gone, without having been too slow."""


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

    @classmethod
    async def start(cls, hello: dict[str, Any]) -> Worker:
        """Raises FunctionError if a function cannot be used."""
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
            async with asyncio.timeout(START_S):
                await self._send(hello)
                answer = await self._receive()
        except TimeoutError as error:
            raise FunctionError(f"reward.functions: importing them took longer than {START_S:.0f} s") from error
        except Died as error:
            raise FunctionError(f"reward.functions: importing them ended the process: {error}") from error
        if "failed" in answer:
            raise FunctionError(answer["failed"])
        self.needs, self.is_async = answer["needs"], answer["is_async"]

    async def ask(self, request: dict[str, Any], timeout_s: float) -> AsyncIterator[tuple[int, Outcome]]:
        """(sample, outcome) as they are done. Raises TimeoutError when nothing comes for so long, Died when nothing can."""
        async with asyncio.timeout(timeout_s):
            await self._send(request)
        for _ in request["samples"]:
            async with asyncio.timeout(timeout_s):
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
            raise Died(await self._how()) from error

    async def _receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        try:
            head = await self.process.stdout.readexactly(LENGTH.size)
            return msgpack.unpackb(await self.process.stdout.readexactly(LENGTH.unpack(head)[0]))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise Died(await self._how()) from error

    async def _how(self) -> str:
        code = await self.process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


@dataclass(slots=True)
class Slot:
    """A place in the pool. Its process changes when it dies."""

    worker: Worker


class Pool:
    """`size` processes. Use as an async context; `score` may be called from any number of tasks."""

    def __init__(self, config: RunConfig, size: int | None = None) -> None:
        self.timeout_s, self.size = config.reward.timeout_s, size or config.reward.workers
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

    async def __aenter__(self) -> Pool:
        """Raises FunctionError if a function cannot be used."""
        starting = [Worker.start(self._hello) for _ in range(self.size)]
        started = await asyncio.gather(*starting, return_exceptions=True)
        self._slots = [Slot(worker) for worker in started if isinstance(worker, Worker)]
        if failed := [error for error in started if isinstance(error, BaseException)]:
            await self.__aexit__()
            raise failed[0]
        for slot in self._slots:
            self._idle.put_nowait(slot)
        return self

    async def __aexit__(self, *exception: object) -> None:
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
        if not slot.worker.alive:
            dead, slot.worker = slot.worker, await Worker.start(self._hello)
            log.info("scoring process %d was replaced by %d", dead.process.pid, slot.worker.process.pid)
