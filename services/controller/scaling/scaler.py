"""Carries scale operations out: reads what there is, advances each operation, writes records and what is wanted.

Guarantees: an operation is in KV (`scale.<id>`) before anything is done for it; a request that is repeated under its key is the
same operation, also after the controller was killed; whatever a dead controller began, the next one goes on with from the record
alone, because wishes are repeated until they hold. Writes are compare-and-set, so that a controller that was stopped and woken
again changes nothing. Pure rules: operation.py. tests/controller/test_scaling.py kills it in each state.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

from services.controller.scaling import operation
from services.controller.scaling.operation import Operation, Seen
from shared import wanted, wire
from shared.errors import Conflict, KeyExists, TransportError
from shared.records import Receipt
from shared.service import Context

log = logging.getLogger(__name__)

PREFIX = "scale."
ACTIVE_S = 0.5
IDLE_S = 2.0
KEPT = 200
"""Operations that are over are kept up to this many."""
DRAIN_MARGIN_S = 10.0


class KeyReused(ValueError):
    """The idempotency key belongs to another request."""


class Scaler:
    """One for each controller. `submit` and `cancel` are the API's; `run` does the work."""

    def __init__(self, ctx: Context, clock: Callable[[], float] = time.time) -> None:
        self.ctx, self._clock = ctx, clock
        self.operations: dict[str, Operation] = {}
        self._revisions: dict[str, int] = {}
        self._found: dict[str, dict[str, float]] = {}
        """By operation: measurements that are not on record yet."""
        self._tidied = False
        self._lock = asyncio.Lock()
        self._news = asyncio.Event()

    async def restore(self) -> None:
        """What is on record."""
        self.operations, self._revisions = {}, {}
        for key in [key for key in await self.ctx.kv.keys() if key.startswith(PREFIX)]:
            if (entry := await self.ctx.kv.get(key)) is not None:
                one = wire.decode(entry[0], Operation)
                self.operations[one.id], self._revisions[one.id] = one, entry[1]

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                await self.store_measurements()
                await self.tick()
            except Conflict as error:
                log.warning("another controller wrote (%s); its records are read again", error)
                await self._again()
            except (TransportError, TimeoutError) as error:
                log.warning("scale operations wait for the broker: %s", error)
            self._news.clear()
            pause = ACTIVE_S if any(not one.over for one in self.operations.values()) else IDLE_S
            try:
                async with asyncio.timeout(pause):
                    await self._news.wait()
            except TimeoutError:
                continue

    async def _again(self) -> None:
        try:
            async with self._lock:
                await self.restore()
        except (TransportError, TimeoutError) as error:
            log.warning("scale operations wait for the broker: %s", error)

    # ---- what the API calls

    async def submit(self, kind: Any, role: str, key: str | None = None, **fields: Any) -> tuple[Operation, bool]:
        """(the operation, whether it is new). A key that was used before gives the same one, or raises KeyReused if it was
        another request."""
        request = json.dumps([kind, role, fields], sort_keys=True, default=str)
        name = _id_of(key) if key else uuid.uuid4().hex[:16]
        async with self._lock:
            if (known := self.operations.get(name)) is not None:
                return self._same(known, request), False
            number = 1 + max((one.number for one in self.operations.values()), default=0)
            one = Operation(name, kind, role, request, number, self._clock(), drain_s=self.drain_s, **fields)
            one.updated, one.reached = one.created, {"PENDING": 0.0}
            try:
                self._revisions[name] = await self.ctx.kv.create(PREFIX + name, wire.encode(one))
            except KeyExists:
                await self.restore()
                return self._same(self.operations[name], request), False
            self.operations[name] = one
            self._news.set()
            return one, True

    def knows(self, key: str | None) -> bool:
        """Whether a request with this key was made."""
        return key is not None and _id_of(key) in self.operations

    async def cancel(self, name: str) -> Operation:
        """Raises KeyError, or ValueError saying why it cannot be cancelled."""
        async with self._lock:
            one = operation.cancel(self.operations[name], self._clock())
            await self._save(one)
            self._news.set()
            return one

    def listed(self, kind: str, role: str, status: str | None = None) -> list[Operation]:
        """The newest first."""
        found = [one for one in self.operations.values() if one.kind == kind and one.role == role]
        return sorted((one for one in found if status in (None, one.status)), key=lambda one: -one.number)

    @property
    def drain_s(self) -> float:
        """What a replica may take to drain unless a request says otherwise."""
        return self.ctx.config.drain_timeout_s + DRAIN_MARGIN_S

    async def seen(self) -> Seen:
        """The replicas, launchers and weights as they are now."""
        record, beats, launchers = await asyncio.gather(
            self._wanted(), self.ctx.registry.alive(), self.ctx.registry.launchers()
        )
        gone = {name: why for launcher in launchers for name, why in launcher.gone.items()}
        version = max((beat.version for beat in beats if beat.service == "dcs"), default=-1)
        return Seen({beat.replica: beat for beat in beats}, record, gone, version)

    async def can_launch(self) -> bool:
        """Whether somebody is there who starts replicas."""
        return bool(await self.ctx.registry.launchers())

    # ---- work

    async def tick(self) -> None:
        """One look at the world, and one step of each operation that goes on."""
        if not any(not one.over for one in self.operations.values()):
            await self._tidy()
            return
        seen = await self.seen()
        async with self._lock:
            ordered = sorted(self.operations.values(), key=lambda one: one.number)
            for index, one in enumerate(ordered):
                after = operation.advance(one, seen, ordered, self._clock())
                if after is not one:
                    ordered[index] = after
                    await self._save(after)
                    await self._tell(one, after)
            gone = list(seen.gone)
            await wanted.change(self.ctx.kv, lambda record: operation.merge(record, ordered, gone), self._is_newest)
            await self._prune()

    async def _tidy(self) -> None:
        """Once: who died between the end of an operation and the record left names there that nobody asks to leave any more."""
        if not self._tidied and await self.ctx.kv.get(wanted.KEY) is not None:
            over = list(self.operations.values())
            await wanted.change(self.ctx.kv, lambda record: operation.merge(record, over), self._is_newest)
        self._tidied = True

    def saw(self, receipt: Receipt) -> None:
        """A receipt: a newcomer's first group that is trained on ends the measurement of the operation that it came by."""
        if receipt.kind != "trained":
            return
        came = [one for one in self.operations.values() if one.kind == "out" and receipt.replica in one.specs]
        came = [one for one in came if one.created <= receipt.at]  # a name that is free again may come a second time
        if came:
            one = max(came, key=lambda one: one.number)
            if receipt.replica not in one.first_trained:
                self._found.setdefault(one.id, {}).setdefault(receipt.replica, round(receipt.at - one.created, 3))

    async def store_measurements(self) -> None:
        """Put down what `saw` found, and tell of it."""
        for name, found in [(name, dict(found)) for name, found in self._found.items() if found]:
            async with self._lock:
                if (one := self.operations.get(name)) is not None:
                    await self._save(replace(one, first_trained=found | one.first_trained))
            for replica, seconds in found.items():
                del self._found[name][replica]
                text = f"{replica}: first group trained {seconds:.1f} s after it was asked for"
                await self.ctx.events.publish("first_trained", text, operation=name, seconds=seconds)

    async def _is_newest(self) -> None:
        """Raises Conflict if another controller wrote since: one that was stopped and woken must not wish for what is over."""
        for one in self.operations.values():
            if not one.over:
                entry = await self.ctx.kv.get(PREFIX + one.id)
                if entry is None or entry[1] != self._revisions[one.id]:
                    raise Conflict(self.ctx.kv.bucket, PREFIX + one.id, self._revisions[one.id])

    async def _save(self, one: Operation) -> None:
        self._revisions[one.id] = await self.ctx.kv.update(PREFIX + one.id, wire.encode(one), self._revisions[one.id])
        self.operations[one.id] = one

    async def _tell(self, before: Operation, after: Operation) -> None:
        if before.status == after.status or not (after.over or before.status == "PENDING"):
            return
        kind = "scaled" if after.over else "scaling"
        text = f"{after.role} {after.kind}: {after.status}" + (f": {after.message}" if after.message else "")
        names = list(after.specs)
        await self.ctx.events.publish(kind, text, operation=after.id, replicas=names, seconds=after.reached)

    async def _wanted(self) -> wanted.Wanted:
        return wanted.load(await self.ctx.kv.get(wanted.KEY))

    async def _prune(self) -> None:
        over = sorted((one for one in self.operations.values() if one.over), key=lambda one: one.number)
        for one in over[: max(0, len(over) - KEPT)]:
            await self.ctx.kv.delete(PREFIX + one.id)
            del self.operations[one.id], self._revisions[one.id]

    def _same(self, known: Operation, request: str) -> Operation:
        if known.request != request:
            raise KeyReused(
                f"this idempotency key belongs to operation {known.id}, which was asked for with other fields; "
                "take another key for another request"
            )
        return known


def _id_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


@contextlib.asynccontextmanager
async def running(*endless: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """These go on inside. What ends one ends the controller: a lost lease, or an error of ours."""
    tasks, owner = [asyncio.create_task(one) for one in endless], asyncio.current_task()
    assert owner is not None
    for task in tasks:
        task.add_done_callback(lambda done: None if done.cancelled() else owner.cancel())
    try:
        yield
    except asyncio.CancelledError:
        for task in tasks:
            if task.done() and not task.cancelled():
                owner.uncancel()
                task.result()
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
