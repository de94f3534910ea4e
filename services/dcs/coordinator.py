"""The DCS at work: the rules of `Versions` made durable, told to the world, and driven by time.

Guarantees, held by tests/dcs/test_service.py, which kills it between any two steps: a change is stored in KV before anyone
hears of it, so a restarted DCS carries on where it was; the store is compare-and-set, so two DCS processes cannot hand out
one number twice; an announcement that was stored is published, at the latest by the next process, under the same message id.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from services.dcs import rollback, snapshots
from services.dcs.announcing import announcement
from services.dcs.batches import in_batches
from services.dcs.delta_maker import DeltaMaker
from services.dcs.mirror import Mirror
from services.dcs.offers import Offer
from services.dcs.rollback import Wish
from services.dcs.snapshots import Manifest, SnapshotError
from services.dcs.state import STATE_KEY, Group, Meeting, Member, State, Version
from services.dcs.versions import UnknownVersion, VersionError, Versions
from shared import clock
from shared.awake import Missing
from shared.config import RunConfig
from shared.errors import TransportError
from shared.failpoints import reach
from shared.kv import KV
from shared.metrics import Events
from shared.records import Announcement, Received
from shared.registry import Registry
from shared.subjects import Subjects
from shared.transfer_queue import TransferQueue
from shared.wire import WireError, decode

log = logging.getLogger(__name__)

T = TypeVar("T")

PUBLISH_DEADLINE_S = 10.0
RETRY_S = 1.0
LONGEST_LOOK_S = 2.0
"""The most that one look at the heartbeats may add to a silence (shared/awake.py)."""
AT_ONCE = 1024
"""Answers that are folded in one change."""


class SnapshotMissing(RuntimeError):
    """The version to be announced has no snapshot that the DCS can see: its files are to be uploaded."""


class Coordinator:
    """One DCS. `change` is the only way in which its state changes."""

    def __init__(
        self, config: RunConfig, queue: TransferQueue, kv: KV, registry: Registry, events: Events, url: str
    ) -> None:
        self.config, self._queue, self._kv, self._registry, self._events = config, queue, kv, registry, events
        self._subjects = Subjects(config.run)
        self.snapshots = config.work_path / "snapshots"
        store = config.dcs.store
        self.mirror = Mirror.open(store, self.snapshots, config.run, events) if store else None
        self.deltas = DeltaMaker(
            self.snapshots, config.dcs.keep_deltas, events, config.dcs.timeout_s, self._files_changed
        )
        self.url = url
        self.changes = 0
        self._rules = self._rules_over(State())
        self._stored = b""
        """The state as it lies in KV. Each change works on what is read from it."""
        self._revision: int | None = None
        self._sure = False
        """The stored state is known to be the one in memory."""
        self._lock = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._missing = Missing(config.heartbeat_ttl_s / 3, LONGEST_LOOK_S)
        self._grouped: set[str] = set()
        """Who was in the last group that this process formed."""

    @property
    def state(self) -> State:
        return self._rules.state

    def _rules_over(self, state: State) -> Versions:
        return Versions(state, timeout_s=self.config.dcs.timeout_s, heartbeat_ttl_s=self.config.heartbeat_ttl_s)

    # -- durability ---------------------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Take up the stored state, and finish what the last process had begun."""
        floor = await self._floor()

        def start(rules: Versions) -> None:
            rules.state.url = self.url
            rules.state.next_version = max(rules.state.next_version, floor + 1)
            rules.wake(clock.now())

        await self.change(start)
        running = [
            known for known in self.state.versions if known.phase == "announced" and clock.now() < known.deadline
        ]
        for version in running:
            try:
                await self._publish(version, await self._manifest(version))
            except SnapshotMissing as error:  # offered in memory: its publisher asks until it is answered
                log.info("%s", error)
        if self.state.next_version > 1:
            under_way = ", ".join(f"version {version.version}" for version in running) or "nothing"
            text = f"{self.state.next_version - 1} versions so far; on its way: {under_way}"
            await self._events.publish("carried_on", text, versions=[version.version for version in running])

    async def _floor(self) -> int:
        """The highest version that ever left a trace: numbers must not be used again even if the KV bucket was lost."""
        last = await self._queue.last(self._subjects.announced)
        told = 0 if last is None else decode(last[0], Announcement).version
        return max([told, *snapshots.versions(self.snapshots)])

    async def change(self, apply: Callable[[Versions], T]) -> T:
        """Apply a change, store the result, and only then make it the state. Raises what `apply` does, or TransportError."""
        async with self._lock:
            if not self._sure:
                await self._reload()
            rules = self._rules_over(State.load(self._stored))
            result = apply(rules)
            data = rules.state.dump()
            if self._revision is None or data != self._stored:
                await self._store(data)
                self._rules, self._stored = rules, data
                self.changes += 1
                async with self._changed:
                    self._changed.notify_all()
            return result

    async def _reload(self) -> None:
        entry = await self._kv.get(STATE_KEY)
        self._stored = State().dump() if entry is None else entry[0]
        self._rules = self._rules_over(State.load(self._stored))
        self._revision = None if entry is None else entry[1]
        self._sure = True

    async def _store(self, data: bytes) -> None:
        self._sure = False  # if this fails, the write may or may not be there, or another process may have written
        if self._revision is None:
            self._revision = await self._kv.create(STATE_KEY, data)
        else:
            self._revision = await self._kv.update(STATE_KEY, data, self._revision)
        self._sure = True

    # -- for the publisher --------------------------------------------------------------------------------------------

    async def allocate(self, step: int, digest: str, reason: str, publisher: str) -> Version:
        version = await self.change(
            lambda rules: rules.allocate(step=step, digest=digest, reason=reason, publisher=publisher, now=clock.now())
        )
        reach("dcs.allocated")
        return version

    async def announce(
        self, version: int, publisher: str, epoch: int, senders: Sequence[Meeting], offer: Offer | None = None
    ) -> Version:
        asked = self._rules.get(version)
        manifest = await self._manifest(asked) if offer is None else offer.of(asked)
        alive = await self._alive()
        epoch_before = self.state.epoch
        known = await self.change(
            lambda rules: rules.announce(
                version, publisher=publisher, epoch=epoch, senders=senders, alive=alive, now=clock.now()
            )
        )
        reach("dcs.decided")
        await self._publish(known, manifest, offer=offer)
        reach("dcs.announced")
        if offer is None and (before := self.latest(below=version)):
            self.deltas.expect(before.version, manifest)
            if known.group is None:
                self.deltas.broadcast_over(version)
        await asyncio.to_thread(self._prune)
        if known.group is None:
            self._files_changed()
        if known.group is not None and known.group.epoch > epoch_before:
            await self._tell_regrouping(known.group)
        return known

    async def _tell_regrouping(self, group: Group) -> None:
        """A new process group stands, because members came or went, or because the last one broke."""
        before, now = self._grouped, set(group.ranks())
        self._grouped = now
        changes = [f"{name} came" for name in sorted(now - before)] + [f"{name} went" for name in sorted(before - now)]
        cause = ", ".join(changes) or "the last one broke, or its publisher was replaced"
        await self._events.publish(
            "regrouped", f"epoch {group.epoch}: {cause}", epoch=group.epoch, members=sorted(now), cause=cause
        )

    async def finish(self, version: int, publisher: str, ok: bool, error: str, seconds: dict[str, float]) -> Version:
        known = await self.change(
            lambda rules: rules.finish(
                version, publisher=publisher, ok=ok, error=error, seconds=seconds, now=clock.now()
            )
        )
        self.deltas.broadcast_over(version)
        self._files_changed()
        if not ok:
            await self._tell_failure(known)
        return known

    async def _tell_failure(self, known: Version) -> None:
        text = f"version {known.version}: {known.error}"
        await self._events.publish("broadcast_failed", text, version=known.version)

    async def upload(self, version: int, name: str, chunks: AsyncIterator[bytes]) -> None:
        """A file of a snapshot whose publisher shares no disk with the DCS; the manifest comes last and completes it."""
        known = self._rules.get(version)
        part = snapshots.partial(self.snapshots, version, "upload")
        if name != snapshots.MANIFEST:
            snapshots.check_name(name)
            await _write(part / name, chunks)
            return
        manifest = Manifest.load(b"".join([chunk async for chunk in chunks]))
        if (manifest.version, manifest.digest) != (version, known.digest):
            raise SnapshotError(f"the uploaded manifest is not that of version {version}")
        if wrong := await asyncio.to_thread(snapshots.problems, part, manifest):
            raise SnapshotError("; ".join(wrong))
        await asyncio.to_thread(snapshots.complete, self.snapshots, part, manifest)

    async def wait_settled(self, version: int, wait_s: float) -> Version:
        """The version, once nothing more is awaited of it or the time is up."""
        if wait_s <= 0:
            return self._rules.get(version)

        def over() -> bool:
            return self._rules.get(version).phase in ("settled", "abandoned")

        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(over), wait_s)
            except TimeoutError:
                log.debug("version %d is not settled after %.0f s", version, wait_s)
        return self._rules.get(version)

    # -- for the members ----------------------------------------------------------------------------------------------

    async def join(self, replica: str, incarnation: str, world_size: int) -> Member:
        before = list(self.state.members)
        member = await self.change(
            lambda rules: rules.join(replica, incarnation=incarnation, world_size=world_size, now=clock.now())
        )
        if member not in before:
            await self._events.publish("member_joined", f"{replica} takes part in broadcasts", replica=replica)
        return member

    async def leave(self, replica: str, incarnation: str, gone: bool) -> int:
        return await self.change(lambda rules: rules.leave(replica, incarnation, gone=gone))

    def announced(self) -> list[Version]:
        """The newest first."""
        return self._rules.announced()

    def latest(self, below: int | None = None) -> Version | None:
        """The newest version (before `below`) that was announced and whose snapshot is here."""
        present = {number for number in snapshots.versions(self.snapshots) if below is None or number < below}
        return next((known for known in self._rules.announced() if known.version in present), None)

    # -- for people ---------------------------------------------------------------------------------------------------

    async def pin(self, version: int, wanted: bool) -> list[int]:
        if wanted and version not in snapshots.versions(self.snapshots):
            raise UnknownVersion(f"version {version} has no snapshot any more, so it cannot be pinned")
        return await self.change(lambda rules: rules.pin(version, wanted))

    async def roll_back(self, version: int) -> Wish:
        """Tell the trainer, which alone can do it."""
        known: dict[int, Announcement] = {}
        async for data, _ in self._queue.read("weights", subject=self._subjects.announced):  # the state forgets sooner
            told = decode(data, Announcement)
            known[told.version] = told
        if (wanted := known.get(version)) is None:
            raise UnknownVersion(f"version {version} was never announced, or it is too long ago")
        for later in known.values():
            if later.version > version and later.step == wanted.step and later.digest != wanted.digest:
                raise VersionError(
                    f"version {version} belongs to a history that was left: step {wanted.step} is version {later.version} now"
                )
        wish = Wish(version, wanted.step)
        await rollback.ask(self._kv, wish)
        await self._events.publish(
            "rollback_asked", f"{wish.reason}, step {wish.step}", version=version, step=wish.step
        )
        return wish

    async def resync(self, replica: str) -> tuple[int, list[str]]:
        """Announce the newest version once more, to be taken by `replica` (`*`: all) whatever it holds."""
        newest = self.latest()
        if newest is None:
            raise UnknownVersion("no version has been announced yet")
        replicas = sorted(self.state.held) if replica == "*" else [replica]
        if unknown := set(replicas) - self._rules.replicas():
            raise UnknownVersion(f"no replica {', '.join(sorted(unknown))} is known here; see /members")
        await self._publish(newest, await self._manifest(newest), resync=replicas)
        await self._events.publish("resync", f"version {newest.version}: {', '.join(replicas)}", replicas=replicas)
        return newest.version, replicas

    # -- what goes on by itself ---------------------------------------------------------------------------------------

    async def fold_received(self) -> None:
        """Follow what the replicas answer on the weights stream, for ever. What came meanwhile is folded in one change: of a
        thousand replicas a thousand answers come to each version, and a change stores the whole state."""
        start = self.state.received_seq + 1
        told = self._queue.read("weights", start_seq=start, subject=self._subjects.received, live=True)
        async for batch in in_batches(told, AT_ONCE):
            records = []
            for data, seq in batch:
                try:
                    records.append((decode(data, Received), seq))
                except WireError as error:
                    what = f"message {seq} of the weights stream: {error}"
                    await self._events.publish("weights_refused", what, seq=seq)
            for (record, _), wrong in zip(records, await self._fold(records), strict=True):
                if wrong or not record.ok:
                    what = f"{record.replica}, version {record.version}: {wrong or record.error}"
                    await self._events.publish("weights_refused", what, version=record.version, replica=record.replica)

    async def _fold(self, records: list[tuple[Received, int]]) -> list[str]:
        while True:
            try:
                return await self.change(lambda rules: [rules.received(record, seq) for record, seq in records])
            except TransportError as error:
                log.warning("%d answers are not folded yet: %s", len(records), error)
                await asyncio.sleep(RETRY_S)

    async def tick(self) -> None:
        """Once a second: leave behind whoever missed a deadline or died in a broadcast."""
        alive = await self._alive()
        if not any(version.phase == "announced" for version in self.state.versions):
            return
        unsettled = [known.version for known in self.state.versions if known.phase == "announced" and not known.result]
        for replica in await self.change(lambda rules: rules.tick(clock.now(), alive)):
            await self._events.publish(
                "member_dropped", f"{replica} did not answer a broadcast in time", replica=replica
            )
        for known in self.state.versions:
            if known.version in unsettled and known.result == "failed":
                await self._tell_failure(known)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _files_changed(self) -> None:
        if self.mirror is not None:
            self.mirror.wake()

    async def _alive(self) -> set[str]:
        """Those who may count on it that have a heartbeat, or had one until a moment ago: after the broker or the machine stood
        still nobody has one for a moment."""
        known = self._rules.replicas()
        living = await self._registry.living(known)
        return known - self._missing.look(known - living, clock.now())

    async def _manifest(self, known: Version) -> Manifest:
        manifest = await asyncio.to_thread(snapshots.read, self.snapshots, known.version)
        if manifest is None or manifest.digest != known.digest:
            raise SnapshotMissing(
                f"version {known.version} has no snapshot below {self.snapshots}: upload its files first"
            )
        return manifest

    async def _publish(
        self, known: Version, manifest: Manifest, resync: list[str] | None = None, offer: Offer | None = None
    ) -> None:
        snapshot = f"{self.url}/versions/{known.version}/files"
        new_group = self._rules.has_new_group(known)
        told = announcement(
            known, manifest, self.config, snapshot, new_group=new_group, resync=resync or (), offer=offer
        )
        name = f"v{known.version}" + (f"-resync-{uuid.uuid4().hex[:8]}" if resync else "")
        await self._queue.publish(self._subjects.announced, told, msg_id=name, deadline_s=PUBLISH_DEADLINE_S)

    def _prune(self) -> None:
        reach("dcs.purging")
        newest = [known.version for known in self._rules.announced()][: self.config.dcs.keep_snapshots]
        keep = {*newest, *self.state.pins}
        if gone := snapshots.prune(self.snapshots, keep, below=newest[0]):
            log.info("removed the snapshots of versions %s", gone)


async def _write(path: Path, chunks: AsyncIterator[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        async for chunk in chunks:
            await asyncio.to_thread(file.write, chunk)
