"""Reads a run's metrics and events for a sink, to the end of the run.

Guarantees: each message is handed over once for as long as the process lives, in order within its stream, over restarts of the
broker; nothing is acknowledged and nobody waits, so a sink that is slow or hangs falls behind and costs the run nothing. What is
handed over is put down as a position (`Position`, a file) afterwards, so that a sink that is killed goes on there; it may get
the last batch twice. Sinks work in a thread, since the libraries behind them block. tests/sinks/test_follow.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from services.controller.attach import Run
from shared.errors import TransportError
from shared.records import Event, Metric
from shared.wire import WireError, decode

log = logging.getLogger(__name__)

BATCH = 1000
BATCH_S = 0.5
AHEAD = 5000
"""Messages read and not handed over yet: then reading waits, and the stream keeps the rest."""
STATE_S = 1.0
LAST_WORDS_S = 3.0
"""Services say their last figures after the run is over."""
CATCH_UP_S = 10.0
STREAMS = {"metrics": Metric, "events": Event}


@dataclass(frozen=True, slots=True)
class Told:
    """One message of a stream."""

    stream: str
    seq: int
    record: Metric | Event


class Sink(Protocol):
    """Where it all goes. Called from one thread at a time, which may block."""

    def take(self, batch: list[Told]) -> None:
        """Hand these on. What it raises ends the sink, and nothing else."""

    def close(self) -> None:
        """The last batch has been taken."""


@dataclass(slots=True)
class Position:
    """The newest sequence that was handed over, by stream; kept in `file` if there is one."""

    file: Path | None = None
    seqs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))

    @classmethod
    def load(cls, file: Path) -> Position:
        """As the last process left it. ValueError if the file is no position."""
        if not file.exists():
            return cls(file)
        try:
            return cls(file, {name: int(json.loads(file.read_text())[name]) for name in STREAMS})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: not the position of a sink ({error}); delete it to begin anew") from error

    def passed(self, batch: Iterable[Told]) -> None:
        """These are handed over."""
        for told in batch:
            self.seqs[told.stream] = max(self.seqs[told.stream], told.seq)
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            partial = self.file.with_name(f"{self.file.name}.tmp")
            partial.write_text(json.dumps(self.seqs))
            partial.replace(self.file)


class Follower:
    """Moves messages from the streams into one sink."""

    def __init__(self, run: Run, sink: Sink, position: Position, streams: Iterable[str] = tuple(STREAMS)) -> None:
        self.run, self.sink, self.position, self.streams = run, sink, position, tuple(streams)
        self.unreadable = 0
        self._queue: asyncio.Queue[Told] = asyncio.Queue(AHEAD)
        self._read = dict(position.seqs)

    async def follow(self) -> None:
        """Until the run is over and everything is handed over. Cancel it to stop earlier."""
        try:
            await self._live()
            await self._rest()
        finally:
            await asyncio.to_thread(self.sink.close)

    async def _live(self) -> None:
        """As it comes, until the run is over."""
        over = asyncio.create_task(self._until_over())
        readers = [asyncio.create_task(self._reading(name, live=True)) for name in self.streams]
        try:
            while not over.done():
                await self._hand_over(await self._batch())
                for reader in readers:
                    if reader.done():
                        reader.result()
            over.result()
        finally:
            for task in (over, *readers):
                task.cancel()
            await asyncio.gather(over, *readers, return_exceptions=True)

    async def _rest(self) -> None:
        """What is left at the end. The broker may have gone with the run."""
        reading = asyncio.gather(*(self._reading(name, live=False) for name in self.streams))
        try:
            async with asyncio.timeout(CATCH_UP_S):
                while not reading.done() or not self._queue.empty():
                    await self._hand_over(await self._batch())
                await reading
        except (TransportError, TimeoutError) as error:
            log.warning("the last messages could not be read (%s); the same command reads them later", error)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await self._hand_over(self._waiting())

    async def _reading(self, stream: str, live: bool) -> None:
        async for data, seq in self.run.queue.read(stream, start_seq=self._read[stream] + 1, live=live):
            try:
                told = Told(stream, seq, decode(data, STREAMS[stream]))
            except WireError as error:
                self.unreadable += 1
                log.warning("message %d of %s is skipped: %s", seq, stream, error)
                continue
            await self._queue.put(told)
            self._read[stream] = seq

    async def _batch(self) -> list[Told]:
        """What lies there, or comes within a moment."""
        try:
            first = await asyncio.wait_for(self._queue.get(), BATCH_S)
        except TimeoutError:
            return []
        return [first, *self._waiting()]

    def _waiting(self) -> list[Told]:
        batch: list[Told] = []
        while len(batch) < BATCH and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch

    async def _hand_over(self, batch: list[Told]) -> None:
        while batch:
            await asyncio.to_thread(self.sink.take, batch)
            await asyncio.to_thread(self.position.passed, batch)
            batch = self._waiting() if self._queue.qsize() >= BATCH else []

    async def _until_over(self) -> None:
        """Until a while after the run's state says that it ended."""
        ended: float | None = None
        while ended is None or time.monotonic() < ended + LAST_WORDS_S:
            await asyncio.sleep(STATE_S)
            if ended is None and await self._is_over():
                ended = time.monotonic()

    async def _is_over(self) -> bool:
        try:
            state = await asyncio.wait_for(self.run.state(), CATCH_UP_S)
        except (TransportError, TimeoutError) as error:
            log.debug("the state of the run cannot be read: %s", error)
            return False
        return state == "finished" or state.startswith("failed")
