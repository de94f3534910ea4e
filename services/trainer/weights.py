"""Publishes the policy's weights: a copy, a version of the DCS, a snapshot, and a broadcast to the members of the group.

`hand_over` returns as soon as the weights are copied; training goes on while a background task asks for their number, writes
the snapshot, meets the members and sends. Publications follow each other: while the answers to one come in the next may be
copied, but no more. Guarantees: a version is announced only when its snapshot is complete; every step has a deadline, so a
member that is dead or stopped costs at most `dcs.timeout_s` and is left behind; a DCS that is away is waited for, and asked
again without a second version arising. A trainer process is one publisher: when a newer one has published, this one is refused
and must stop. Where the model is cut into pipeline stages the weights have several senders, each with those of its stage
(sender.py). They are one version all the same: the leader alone speaks to the DCS of it, and a sender that fails fails for all.
tests/dcs/test_publisher.py, test_weights.py, test_stages.py.

With `placement: colocate` engines take the copy from memory, and the version is announced with it at once; its snapshot is
written afterwards, for those who come later. `unshare` removes what every engine has taken.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from services.dcs import segments, snapshots
from services.dcs.client import DcsClient, DcsUnavailable, Refused, persist
from services.dcs.digest import digest
from services.dcs.snapshots import Manifest
from services.dcs.versions import FAILED_GRACE_S
from services.trainer.sender import Sender, SenderHandle, Sent
from services.trainer.snapshot_files import NewSnapshot
from services.trainer.stage import StageAddress, StageLost
from services.trainer.weight_copy import Copier, Copy, Outline, manifest_of
from shared import failpoints
from shared.service import Context, ServiceFailed
from shared.timing import timed

log = logging.getLogger(__name__)

T = TypeVar("T")

STOP_GRACE_S = 3.0
"""How long a DCS that is away is still waited for once this service is to stop."""
SETTLE_MARGIN_S = 10.0
POLL_S = 5.0
UPLOAD_FIRST, NOT_FOUND = 412, 404


@dataclass(slots=True)
class Publication:
    """One version on its way."""

    step: int
    reason: str
    copy: Copy
    """What this process sends of it."""
    outlines: list[Outline]
    """Of all senders."""
    seconds: dict[str, float]
    version: int = 0
    numbered: asyncio.Event = field(default_factory=asyncio.Event)
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    sent: asyncio.Event = field(default_factory=asyncio.Event)
    """The copy is of no further use."""
    manifest: Manifest | None = None
    """Of the snapshot, once that is there."""
    group: dict[str, Any] | None = None
    """Whom it is sent to."""
    error: str = ""
    """Why that failed."""

    @property
    def digest(self) -> str:
        return digest(spec for outline in self.outlines for spec in outline.specs)

    @property
    def nbytes(self) -> int:
        return sum(sum(outline.nbytes) for outline in self.outlines)


class WeightPublisher:
    """The trainer leader's side of the weights."""

    def __init__(self, ctx: Context, model_dir: Path, stages: Sequence[StageAddress] = ()) -> None:
        """`stages`: the further senders. They have copied theirs when the tensors that are handed over here are exhausted."""
        self._ctx, self._model_dir = ctx, model_dir
        self._options = ctx.config.dcs
        self._root = ctx.config.work_path / "snapshots"
        self._incarnation = uuid.uuid4().hex
        self._dcs = DcsClient(ctx.kv)
        self._shared = ctx.config.colocated
        on_device = self._options.cuda_ipc
        names = self._names() if self._shared and not on_device else None
        copier = Copier(self._options.bucket_mb << 20, names, "cuda" if on_device else None)
        self._own = Sender(copier, self._options.timeout_s)
        patience_s = ctx.config.trainer.rank_timeout_s
        here = SenderHandle(lambda order, _: self._own.handle(order), patience_s)
        self._senders = [here, *(stage.handle(patience_s) for stage in stages)]
        self._epoch = 0
        """Of the group that all senders are in."""
        self._last: Publication | None = None
        self._delivery: asyncio.Task[None] | None = None
        """Of the last publication; it is done after those before."""
        self._stop_seen = 0.0

    def _names(self) -> Callable[[], str]:
        """Of segments. Those of earlier trainers go: no engine is awake, and what they offered is not announced any more."""
        prefix = segments.prefix(self._ctx.run, self._ctx.config.workdir)
        if gone := segments.sweep(prefix):
            log.info("removed %d segments of a trainer before this one", len(gone))
        numbers = itertools.count()
        return lambda: f"{prefix}{self._incarnation[:12]}-{next(numbers)}"

    async def publish(self, step: int, tensors: Iterable[tuple[str, torch.Tensor]], reason: str) -> int:
        """Hand the weights after `step` updates over and return their version."""
        await self.hand_over(step, tensors, reason)
        return await self.numbered()

    async def hand_over(self, step: int, tensors: Iterable[tuple[str, torch.Tensor]], reason: str) -> None:
        """Copy the weights, to be published after the earlier ones. Waits while the last copy is still being sent. Raises what
        went wrong with an earlier publication."""
        started = time.monotonic()
        if self._last is not None:
            await self._until(self._last.sent, "waiting for the members")
        if self._delivery is not None and self._delivery.done():
            self._delivery.result()
        self.unshare()
        seconds = {"publish_wait_s": time.monotonic() - started}
        try:
            own = await self._ctx.compute(self._own.copy, tensors)
        except segments.SegmentError as error:
            raise ServiceFailed(str(error)) from error
        assert self._own.held is not None
        outlines = [own, *await asyncio.gather(*(sender.outline() for sender in self._senders[1:]))]
        seconds["copy_s"] = max(outline.copy_s for outline in outlines)
        seconds["checksum_s"] = max(outline.checksum_s for outline in outlines)
        self._last = Publication(step, reason, self._own.held, outlines, seconds)
        self._delivery = asyncio.create_task(self._deliver(self._last, self._delivery))

    async def numbered(self) -> int:
        """The version of what was handed over last, as soon as the DCS has given it. Raises what went wrong."""
        assert self._last is not None
        await self._until(self._last.numbered, "waiting for the DCS")
        return self._last.version

    async def announced(self) -> int:
        """The version of what was handed over last, once everybody can hear of it. Raises what went wrong."""
        assert self._last is not None
        await self._until(self._last.announced, "waiting for the DCS")
        return self._last.version

    def unshare(self) -> None:
        """Everybody has taken what was handed over last, out of shared memory."""
        if self._last is not None:
            self._last.copy.unshare()

    async def settled(self) -> None:
        """Until the last publication is sent and answered, or its stragglers are left behind. Raises what went wrong."""
        while self._delivery is not None:
            await asyncio.wait({self._delivery}, timeout=1.0)
            if self._delivery.done():
                delivery, self._delivery = self._delivery, None
                delivery.result()
            else:
                await self._ctx.beat("waiting for the members")

    async def _until(self, reached: asyncio.Event, state: str) -> None:
        """Until the last publication has got that far. Raises why it does not."""
        while self._delivery is not None and not reached.is_set():
            waiting = asyncio.create_task(reached.wait())
            try:
                await asyncio.wait({waiting, self._delivery}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
            if reached.is_set():
                break
            if self._delivery.done():
                self._delivery.result()
                break
            await self._ctx.beat(state)

    async def close(self) -> None:
        """Settle, leave the group, and end. What cannot be finished is logged."""
        try:
            await self.settled()
        except (ServiceFailed, DcsUnavailable, OSError) as error:
            log.warning("the last publication was not finished: %s", error)
        finally:
            self.unshare()
            await self._leave()
            for sender in self._senders:
                sender.close()
            await self._dcs.close()

    # -- one publication ----------------------------------------------------------------------------------------------

    async def _deliver(self, publication: Publication, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await before
            await self._number(publication)
            if self._shared:
                await self._send(publication, self._offer(publication))
                await self._settle(publication)
                await self._keep(publication)
                publication.sent.set()
            else:
                await self._keep(publication)
                await self._send(publication)
                publication.sent.set()
                await self._settle(publication)
        except DcsUnavailable as error:
            if not self._ctx.stopping.is_set() or not publication.version:
                raise
            log.warning("version %d was not finished before the stop: %s", publication.version, error)
        finally:
            self._ctx.metrics.emit(
                step=publication.step,
                weights_version=publication.version,
                weights_bytes=publication.nbytes,
                **publication.seconds,
            )

    async def _number(self, publication: Publication) -> None:
        with timed(publication.seconds, "number_s"):
            answer = await self._ask(
                lambda: self._dcs.allocate(
                    publisher=self._incarnation,
                    step=publication.step,
                    digest=publication.digest,
                    reason=publication.reason,
                )
            )
        publication.version = int(answer["version"])
        publication.numbered.set()

    def _offer(self, publication: Publication) -> dict[str, Any]:
        """Where engines of this host find the copy, and what it is."""
        places = [bucket.place for bucket in publication.copy.buckets]
        manifest = manifest_of(publication.outlines, publication.version, publication.step)
        return {"manifest": asdict(manifest), "host": socket.gethostname(), "segments": places}

    async def _keep(self, publication: Publication) -> None:
        """Write the snapshot, where the DCS sees it or has it sent."""
        with timed(publication.seconds, "snapshot_s"):
            manifest = await self._write(publication)
            if self._shared and not await self._ask(lambda: self._sees(publication.version)):
                await self._ask(lambda: self._upload(publication.version, manifest))
        publication.manifest = manifest
        failpoints.reach("weights.snapshot")

    async def _sees(self, version: int) -> bool:
        try:
            await self._dcs.manifest(version)
        except Refused as refused:
            if refused.status != NOT_FOUND:
                raise
            return False
        return True

    async def _upload(self, version: int, manifest: Manifest) -> None:
        await self._dcs.upload(version, snapshots.folder(self._root, version), manifest)

    async def _send(self, publication: Publication, offer: dict[str, Any] | None = None) -> None:
        with timed(publication.seconds, "announce_s"):
            group = publication.group = await self._announce(publication, offer)
        publication.announced.set()
        failpoints.reach("weights.announced")
        if group is not None:
            await self._broadcast(publication, group)
        failpoints.reach("weights.sent")

    async def _settle(self, publication: Publication) -> None:
        """Tell the result, and wait until every member has answered or is left behind. A group that failed is given up."""
        with timed(publication.seconds, "settle_s"):
            status = await self._ask(
                lambda: self._dcs.result(
                    publication.version,
                    publisher=self._incarnation,
                    ok=not publication.error,
                    error=publication.error,
                    seconds=publication.seconds,
                    wait_s=POLL_S,
                )
            )
            if not await self._await_answers(publication.version, status) or publication.group is None:
                await self._leave()

    async def _write(self, publication: Publication) -> Manifest:
        new = await asyncio.to_thread(
            NewSnapshot,
            self._root,
            publication.outlines,
            version=publication.version,
            step=publication.step,
            owner=self._incarnation,
        )
        writing = (sender.write(new.folder, shards) for sender, shards in zip(self._senders, new.shards, strict=True))
        written = [entry for entries in await asyncio.gather(*writing) for entry in entries]
        return await asyncio.to_thread(new.complete, self._model_dir, written)

    async def _announce(self, publication: Publication, offer: dict[str, Any] | None) -> dict[str, Any] | None:
        """Returns the group to send to."""

        async def tell() -> dict[str, Any]:
            dcs = await self._dcs.host()
            return await self._dcs.announce(
                publication.version,
                publisher=self._incarnation,
                epoch=self._epoch,
                senders=await asyncio.gather(*(sender.meet(dcs) for sender in self._senders)),
                offer=offer,
            )

        async def tell_with_files() -> dict[str, Any]:
            try:
                return await tell()
            except Refused as refused:
                if refused.status != UPLOAD_FIRST or publication.manifest is None:
                    raise
            await self._upload(publication.version, publication.manifest)
            return await tell()

        return (await self._ask(tell_with_files))["group"]

    async def _await_answers(self, version: int, status: dict[str, Any]) -> bool:
        """True if all members have it by this broadcast. `status` is what the DCS said last."""
        deadline = time.monotonic() + self._options.timeout_s + FAILED_GRACE_S + SETTLE_MARGIN_S
        while status["phase"] == "announced":
            if time.monotonic() > deadline:
                text = f"the DCS does not settle version {version}"
                await self._ctx.events.publish("not_settled", text, version=version)
                return False
            status = await self._ask(lambda: self._dcs.version(version, wait_s=POLL_S))
        return bool(status["clean"])

    # -- the senders --------------------------------------------------------------------------------------------------

    async def _broadcast(self, publication: Publication, group: dict[str, Any]) -> None:
        """Have every sender send all of its buckets. If one fails, so does the broadcast."""

        async def send(number: int) -> Sent:
            try:
                return await self._senders[number].send(group, number)
            except StageLost as error:
                return Sent(str(error), {})

        sent = await asyncio.gather(*(send(number) for number in range(len(self._senders))))
        for name in ("join_s", "broadcast_s"):
            publication.seconds[name] = max(each.seconds.get(name, 0.0) for each in sent)
        publication.error = "; ".join(each.error for each in sent if each.error)
        if publication.error:
            await self._leave()
        else:
            self._epoch = group["epoch"]

    async def _leave(self) -> None:
        """All senders give the group up."""
        self._epoch = 0
        for sender in self._senders:
            try:
                await sender.leave()
            except StageLost as error:
                log.warning("%s", error)

    # -- the DCS ------------------------------------------------------------------------------------------------------

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """Ask the DCS, waiting for one that is away."""

        async def pause(seconds: float) -> bool:
            if self._ctx.stopping.is_set():
                self._stop_seen = self._stop_seen or time.monotonic()
                if time.monotonic() - self._stop_seen > STOP_GRACE_S:
                    return False
            await asyncio.sleep(seconds)
            return True

        try:
            return await persist(call, pause)
        except Refused as error:
            raise ServiceFailed(f"the DCS refuses this trainer's weights: {error}") from error
