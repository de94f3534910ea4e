"""The DCS's HTTP interface: what the requests and answers hold, and which rule of `Versions` each one asks for.

Metadata; the files of snapshots and deltas are files_api.py, what people ask for is control_api.py. OpenAPI at /openapi.json.
404: no such version or file; 409: the request does not fit the state (a replaced publisher, an overtaken version); 412: the DCS
cannot see the snapshot, upload it; 422: malformed; 503: the broker does not answer, try again. Every request may be repeated:
it changes nothing the second time.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from services.dcs import control_api, files_api, snapshots
from services.dcs.control_api import GroupAnswer
from services.dcs.coordinator import Coordinator, SnapshotMissing
from services.dcs.files_api import Wait
from services.dcs.handles import Place
from services.dcs.offers import Offer
from services.dcs.state import Meeting, State, Version
from services.dcs.versions import UnknownVersion, VersionError
from shared.errors import TransportError

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Field(min_length=1, max_length=128)]


class PublishRequest(BaseModel):
    publisher: Name
    """Incarnation of the trainer process: a new one with every start."""
    step: int = Field(ge=0)
    digest: Sha256
    reason: str = ""


class OfferRequest(BaseModel):
    manifest: dict[str, Any]
    """As snapshot.json, but for the files, which are written later."""
    host: str
    segments: list[Place]
    """One a bucket: a name (services/dcs/segments.py), or the fields of a handle (services/dcs/handles.py)."""


class MeetingRequest(BaseModel):
    host: str
    port: int = Field(ge=1, le=65535)


class AnnounceRequest(BaseModel):
    publisher: Name
    epoch: int = 0
    """The group that the publisher still has, 0: none."""
    senders: list[MeetingRequest] = Field(min_length=1)
    """Where a new group would meet: the TCPStore of each that sends."""
    offer: OfferRequest | None = None
    """Instead of a group: engines on the publisher's device take the weights from its memory (`placement: colocate`)."""


class ResultRequest(BaseModel):
    publisher: Name
    ok: bool
    error: str = ""
    seconds: dict[str, float] = {}


class JoinRequest(BaseModel):
    replica: Name
    incarnation: Name
    """Of the engine: a new one with every start."""
    world_size: int = Field(1, ge=1)


class VersionAnswer(BaseModel):
    version: int
    step: int
    digest: str
    reason: str
    phase: str
    group: GroupAnswer | None
    result: str
    error: str
    answers: dict[str, str]
    awaited: list[str]
    dropped: list[str]
    clean: bool
    """Every member of the group got it by broadcast, so the group can be used again."""
    announced_at: float
    seconds: dict[str, float]
    """What took the publisher how long."""
    pinned: bool


class MemberAnswer(BaseModel):
    replica: str
    world_size: int
    held: int | None
    """The version that it last verified."""


class LeaveAnswer(BaseModel):
    awaited: int
    """A version whose broadcast still counts on the member, 0: none."""


def build(coordinator: Coordinator) -> FastAPI:
    app = FastAPI(title="Slipstream DCS", description=__doc__)

    @app.get("/health")
    async def health() -> dict[str, bool]:
        """It answers, so its loop goes round."""
        return {"ok": True}

    _refusals(app)
    _version_routes(app, coordinator)
    files_api.add_routes(app, coordinator)
    _member_routes(app, coordinator)
    control_api.add_routes(app, coordinator)
    return app


def _refusals(app: FastAPI) -> None:
    @app.exception_handler(VersionError)
    async def refused(request: Request, error: VersionError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 404 if isinstance(error, UnknownVersion) else 409)

    @app.exception_handler(snapshots.SnapshotError)
    async def damaged(request: Request, error: snapshots.SnapshotError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 409)

    @app.exception_handler(SnapshotMissing)
    async def missing(request: Request, error: SnapshotMissing) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 412)

    @app.exception_handler(TransportError)
    async def unavailable(request: Request, error: TransportError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 503)


def _version_routes(app: FastAPI, coordinator: Coordinator) -> None:
    def shown(version: Version) -> VersionAnswer:
        return _version_answer(coordinator, version)

    @app.post("/versions")
    async def publish(request: PublishRequest) -> VersionAnswer:
        """A number for these weights."""
        return shown(await coordinator.allocate(request.step, request.digest, request.reason, request.publisher))

    @app.post("/versions/{version}/announce")
    async def announce(version: int, request: AnnounceRequest) -> VersionAnswer:
        """The snapshot is complete, or the weights are offered in memory, and the publisher is ready: tell the members."""
        offer = None if request.offer is None else Offer(**request.offer.model_dump())
        senders = [Meeting(one.host, one.port) for one in request.senders]
        known = await coordinator.announce(version, request.publisher, request.epoch, senders, offer)
        return shown(known)

    @app.post("/versions/{version}/result")
    async def result(version: int, request: ResultRequest, wait_s: Wait = 0.0) -> VersionAnswer:
        """How the broadcast went, on the publisher's side; with `wait_s` answered as below."""
        await coordinator.finish(version, request.publisher, request.ok, request.error, request.seconds)
        return shown(await coordinator.wait_settled(version, wait_s))

    @app.get("/versions")
    async def known() -> list[VersionAnswer]:
        """The newest versions, the oldest first."""
        return [shown(version) for version in coordinator.state.versions]

    @app.get("/versions/latest")
    async def latest() -> VersionAnswer:
        """The newest version that can be pulled."""
        found = coordinator.latest()
        if found is None:
            raise HTTPException(404, "no version has been announced yet")
        return shown(found)

    @app.get("/versions/{version}")
    async def one(version: int, wait_s: Wait = 0.0) -> VersionAnswer:
        """The course of a version; with `wait_s`, once it is settled or the time is up."""
        return shown(await coordinator.wait_settled(version, wait_s))


def _member_routes(app: FastAPI, coordinator: Coordinator) -> None:
    @app.get("/members")
    async def members() -> list[MemberAnswer]:
        """Who is in the next broadcast group."""
        return [_member_answer(coordinator.state, m.replica, m.world_size) for m in coordinator.state.members]

    @app.post("/members")
    async def join(request: JoinRequest) -> MemberAnswer:
        """Into the group, from the next version on."""
        member = await coordinator.join(request.replica, request.incarnation, request.world_size)
        return _member_answer(coordinator.state, member.replica, member.world_size)

    @app.delete("/members/{replica}")
    async def leave(replica: str, incarnation: str, gone: bool = False) -> LeaveAnswer:
        """Out of the group, from the next version on; `gone`: a broadcast on its way need not wait for it either."""
        return LeaveAnswer(awaited=await coordinator.leave(replica, incarnation, gone))


def _version_answer(coordinator: Coordinator, version: Version) -> VersionAnswer:
    return VersionAnswer(
        version=version.version,
        step=version.step,
        digest=version.digest,
        reason=version.reason,
        phase=version.phase,
        group=GroupAnswer.of(version.group, coordinator.config) if version.group else None,
        result=version.result,
        error=version.error,
        answers=version.answers,
        awaited=[member.replica for member in version.awaited()],
        dropped=version.dropped,
        clean=version.clean(),
        announced_at=version.announced_at,
        seconds=version.seconds,
        pinned=version.version in coordinator.state.pins,
    )


def _member_answer(state: State, replica: str, world_size: int) -> MemberAnswer:
    return MemberAnswer(replica=replica, world_size=world_size, held=state.held.get(replica))
