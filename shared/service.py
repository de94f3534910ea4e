"""The life of every service: connect, read the run's config, register, work, drain, leave with a telling exit code.

    0  the run is finished, or the service was asked to stop and drained
    1  it failed; the log and an event say why
    2  the config, the command or what the broker lets this service do is wrong
    3  the broker cannot be reached or is no JetStream broker
    4  another replica holds the role that only one may have

A service is `async def main(ctx: Context)`. Its event loop speaks to the broker and nothing else may block it: computing goes
through `ctx.compute`, into one dedicated thread. `main` watches `ctx.stopping`, which SIGTERM, SIGINT and the end of the run
set, and returns after finishing what it holds.

The heartbeat is written by the worker's own loop (`ctx.beat`), never by a bystander, so that a replica whose loop hangs falls
silent, and its launcher replaces it. Where the loop waits for something long it vouches for that (`ctx.vouch`, `ctx.compute`)
and goes on beating, for a computation at most `hang_timeout_s`. tests/shared/test_service.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from shared import config as run_config
from shared import wanted
from shared.allocator import keep_freed_blocks
from shared.config import ConfigError, RunConfig
from shared.deliveries import Deliveries
from shared.errors import (
    AccessDenied,
    AlreadyActive,
    BrokerUnavailable,
    BucketMissing,
    LeaseLost,
    NotJetStream,
    TransportError,
)
from shared.jetstream import Connection
from shared.kv import KV
from shared.metrics import Events, Metrics
from shared.records import Heartbeat
from shared.registry import Registry
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue

log = logging.getLogger("slipstream")

T = TypeVar("T")

OWNER = "controller"
"""The service that may create what a run consists of at the broker."""
CONNECT_DEADLINE_S = 10.0
CONFIG_DEADLINE_S = 30.0
STATE_POLL_S = 1.0
LEAVING_POLL_S = 2.0
BEAT_EVERY_S = 2.0
CHANGE_EVERY_S = 0.5
"""A state that lasts for less than this is not worth a write."""
HEALTH_FILE = os.environ.get("SLIPSTREAM_HEALTH_FILE", "")
"""Touched by the worker's loop as it comes round, for what watches containers: it needs neither the broker nor a port."""


class ServiceFailed(RuntimeError):
    """A fault that the service understands and that a person must mend. Exit code 1, no traceback."""


class Context:
    """What a service's main works with."""

    def __init__(
        self,
        service: str,
        replica: str,
        config: RunConfig,
        connection: Connection,
        queue: TransferQueue,
        kv: KV,
        registry: Registry,
    ) -> None:
        self.service, self.replica, self.config = service, replica, config
        self.run, self.subjects = config.run, Subjects(config.run)
        self.connection, self.queue, self.kv, self.registry = connection, queue, kv, registry
        self.metrics = Metrics(queue, self.subjects, service, replica)
        self.events = Events(queue, self.subjects, service, replica)
        self.deliveries = queue.observer = Deliveries(self.events)
        self.stopping = asyncio.Event()
        self.started = time.time()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{service}-compute")
        self._heartbeat = Heartbeat(
            service, replica, "", 0, -1, -1, {}, socket.gethostname(), os.getpid(), self.started, self.started
        )
        self._beaten, self._shown, self._told = 0.0, 0.0, ""
        self._beating = asyncio.Lock()

    async def compute(self, function: Callable[..., T], *args: Any) -> T:
        """Run `function` in the one computing thread, so that the loop goes on acknowledging, and beating for as long as
        `hang_timeout_s`."""
        work = asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        return await self.vouch(work, self.config.hang_timeout_s)

    async def vouch(self, awaitable: Awaitable[T], limit_s: float | None = None) -> T:
        """The awaitable's result, beating meanwhile. For what ends by a deadline of its own; else `limit_s` says from when on
        it is taken for hung: this replica is silent then, so that its launcher replaces it."""
        work, began = asyncio.ensure_future(awaitable), time.monotonic()
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=BEAT_EVERY_S)
                if not work.done() and (limit_s is None or time.monotonic() - began < limit_s):
                    await self.beat(self._heartbeat.state)
            return work.result()
        finally:
            if not work.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    async def beat(
        self,
        state: str,
        *,
        progress: int | None = None,
        version: int | None = None,
        step: int | None = None,
        **detail: Any,
    ) -> None:
        """Tell the registry that the worker's loop came by here; what is not given stays as it was. Writes at most every two
        seconds, or every half when `state` is another than was written last."""
        last, now = self._heartbeat, time.monotonic()
        if HEALTH_FILE and now - self._shown >= BEAT_EVERY_S:
            self._shown = now
            Path(HEALTH_FILE).touch()
        self._heartbeat = replace(
            last,
            state=state,
            progress=last.progress if progress is None else progress,
            version=last.version if version is None else version,
            step=last.step if step is None else step,
            detail=detail or last.detail,
            at=time.time(),
        )
        if self._beating.locked() or now - self._beaten < (BEAT_EVERY_S if state == self._told else CHANGE_EVERY_S):
            return
        self._beaten, self._told = now, state
        try:
            async with self._beating:
                await self.registry.beat(self._heartbeat)
        except (LeaseLost, AccessDenied):
            raise
        except TransportError as error:  # the broker is away: work that needs it waits by itself
            log.warning("no heartbeat: %s", error)

    async def withdraw(self) -> None:
        """This process fails: nobody shall wait for its heartbeat to run out."""
        async with self._beating:
            await self.registry.withdraw(self._heartbeat)

    async def stop_or(self, awaitable: Awaitable[T], timeout_s: float | None = None) -> T | None:
        """The awaitable's result, or None once the service is to stop or the time is up (the awaitable is cancelled then)."""
        work = asyncio.ensure_future(awaitable)
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({work, stop}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)

    async def sleep(self, seconds: float) -> None:
        """Sleep, or return at once when the service is to stop."""
        await self.stop_or(asyncio.sleep(seconds))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def run_service(
    service: str, main: Callable[[Context], Awaitable[None]], *, nats_url: str, run: str, replica: str | None = None
) -> int:
    """Live as `service` of `run` until the run ends or the process is told to stop. Returns the exit code."""
    logging.basicConfig(
        level=os.environ.get("SLIPSTREAM_LOG", "INFO"),
        format=f"%(asctime)s {service} %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    replica = replica or f"{service}-{uuid.uuid4().hex[:6]}"
    keep_freed_blocks()
    try:
        import uvloop

        return uvloop.run(_live(service, main, nats_url, run, replica))
    except ConfigError as error:
        return _leave(2, str(error))
    except (BrokerUnavailable, NotJetStream) as error:
        return _leave(3, str(error))
    except AccessDenied as error:
        return _leave(2, str(error))
    except (AlreadyActive, LeaseLost) as error:
        return _leave(4, str(error))
    except ServiceFailed as error:
        return _leave(1, str(error))


def _leave(code: int, why: str) -> int:
    print(f"slipstream: {why}", file=sys.stderr, flush=True)
    return code


async def _live(service: str, main: Callable[[Context], Awaitable[None]], url: str, run: str, replica: str) -> int:
    subjects = Subjects(run)
    connection = await Connection.open(url, name=f"{run}/{replica}", deadline_s=CONNECT_DEADLINE_S)
    connection.be_patient()
    try:
        kv, config = await _wait_for_run(connection, subjects)
        queue = TransferQueue(connection, subjects)
        if service == OWNER:
            await queue.ensure_streams(config)
        else:
            await queue.wait_for_streams(CONFIG_DEADLINE_S)
        registry = await Registry.open(connection, subjects, ttl_s=config.heartbeat_ttl_s, create=service == OWNER)
        try:
            return await _work(Context(service, replica, config, connection, queue, kv, registry), main)
        finally:
            await queue.close()
    finally:
        await connection.close()


async def _wait_for_run(connection: Connection, subjects: Subjects) -> tuple[KV, RunConfig]:
    """The run's bucket and config, which `slipstream up` writes. A service may be started before it."""
    deadline = time.monotonic() + CONFIG_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            kv = await KV.open(connection, subjects.config_bucket, create=False)
        except BucketMissing:
            kv = None
        if kv is not None and (entry := await kv.get("config")) is not None:
            return kv, run_config.loads(entry[0])
        log.info("waiting for the config of run %r", subjects.run)
        await asyncio.sleep(1.0)
    raise ConfigError(
        f"no run named {subjects.run!r} on this broker after {CONFIG_DEADLINE_S:.0f} s; "
        "check --run, or start it with `slipstream up`"
    )


async def _work(context: Context, main: Callable[[Context], Awaitable[None]]) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, context.stopping.set)
    watches = [_watch_state(context), context.deliveries.tell()]
    if context.service in wanted.SCALABLE:
        watches.append(_watch_leaving(context))
    watchers = [asyncio.create_task(watch) for watch in watches]
    try:
        await context.beat("starting")
        await main(context)
        await context.deliveries.flush()
        context.metrics.emit()
        await context.registry.leave(context.service, context.replica)
        return 0
    except (AlreadyActive, LeaseLost):
        raise
    except Exception as error:
        if not isinstance(error, ConfigError):
            await _if_possible(context.events.publish("failed", f"{type(error).__name__}: {error}"))
        await _if_possible(context.withdraw())
        raise
    finally:
        for watcher in watchers:
            watcher.cancel()
        context.close()


async def _if_possible(last: Awaitable[None]) -> None:
    """What a process does that fails: what is told of is its error, not that the broker took nothing more from it."""
    with contextlib.suppress(TransportError, TimeoutError):
        await asyncio.wait_for(last, CONNECT_DEADLINE_S)


async def _watch_state(context: Context) -> None:
    """Set `stopping` when the run has ended."""
    while True:
        await asyncio.sleep(STATE_POLL_S)
        try:
            entry = await context.kv.get("state")
        except TransportError as error:
            log.warning("the broker does not answer: %s", error)
            continue
        if entry is not None and entry[0] != b"running":
            log.info("the run is over: %s", entry[0].decode())
            context.stopping.set()
            return


async def _watch_leaving(context: Context) -> None:
    """Set `stopping` when a scale operation asks this replica to leave."""
    while True:
        await asyncio.sleep(LEAVING_POLL_S)
        try:
            leaves = await wanted.leaves(context.kv, context.replica)
        except TransportError as error:
            log.debug("the broker does not answer: %s", error)
            continue
        if leaves:
            log.info("asked to leave by a scale operation")
            context.stopping.set()
            return
