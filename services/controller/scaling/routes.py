"""The REST API of scale operations, for each role of which there may be any number. docs/scaling.md has it with curl.

POST /{role}/scale_out                 to `num_replicas` (absolute), or with `engine_urls`: SGLang servers that run elsewhere
POST /{role}/scale_in                  to `num_replicas` (absolute), or `replicas` by name, or `engine_urls`
GET  /{role}/scale_out[/{id}]          and scale_in: operations, the newest first
POST /{role}/scale_out/{id}/cancel     and scale_in
GET  /{role}/engines                   the replicas that there are
POST /{role}/engines                   register engines elsewhere: as scale_out with `engine_urls`

A request under a key (`Idempotency-Key`, or the field `idempotency_key`) may be repeated: it is one operation.
tests/controller/test_scaling.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Header, HTTPException, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from services.controller.scaling import operation
from services.controller.scaling.operation import STATES, Operation
from services.controller.scaling.scaler import KeyReused, Scaler

Role = Literal["rollout", "reward", "teacher", "reference"]
Key = Annotated[str | None, Header(alias="Idempotency-Key", max_length=200)]
OUT_TIMEOUT_S = 600.0
NOBODY = (
    "nobody is there who starts replicas for this run: that is `slipstream up`. Under Docker Compose use "
    "`docker compose up -d --scale`, under Kubernetes `kubectl scale`: a replica needs no more than the broker's URL and the "
    "run's name"
)
MODEL: Literal["default"] = "default"


def one_spelling(urls: list[str]) -> list[str]:
    """No slash at the end, each once."""
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL of an engine; write it as http://host:port")
    return list(dict.fromkeys(url.rstrip("/") for url in urls))


Urls = Annotated[list[str], AfterValidator(one_spelling)]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    model_name: Literal["default"] = MODEL
    """There is one."""
    num_replicas: int | None = Field(None, ge=0, le=10_000)
    """How many there shall be, engines elsewhere not counted."""
    engine_urls: Urls = Field([], max_length=1000)
    """Engines elsewhere."""
    timeout_secs: float | None = Field(None, gt=0, le=86_400)
    idempotency_key: str | None = Field(None, min_length=1, max_length=200)


class ScaleOut(Request):
    partial_success_policy: Literal["keep_partial", "rollback_all"] = "keep_partial"
    """When some come up and some do not: keep those that did, or take all back."""


class ScaleIn(Request):
    replicas: list[str] = Field([], max_length=1000)
    """By name."""
    force: bool = False
    """End them without draining. What they hold is delivered to others."""
    dry_run: bool = False
    """Only say which would leave."""


class Engines(BaseModel):
    model_config = ConfigDict(extra="forbid")
    urls: Urls = Field(min_length=1, max_length=1000)
    timeout_secs: float | None = Field(None, gt=0, le=86_400)
    partial_success_policy: Literal["keep_partial", "rollback_all"] = "keep_partial"
    idempotency_key: str | None = Field(None, min_length=1, max_length=200)


class Answer(BaseModel):
    model_config = ConfigDict(protected_namespaces=())
    request_id: str
    """'' for a dry run."""
    kind: str
    role: str
    status: str
    model_name: str
    target: int | None
    num_replicas: int
    """Replicas that this operation starts or ends."""
    engine_urls: list[str]
    engine_ids: list[str]
    """Scale-out: newcomers that stay."""
    selected_engines: list[str]
    """Scale-in: who leaves."""
    removed_engines: list[str]
    failed_engines: dict[str, str]
    """And why."""
    force: bool
    timeout_secs: float
    weight_version: int | None
    """Newcomers hold these weights or newer."""
    created_at: float
    updated_at: float
    seconds: dict[str, float]
    """From the request to each state."""
    first_trained_secs: dict[str, float]
    """From the request to each newcomer's first group that was trained on."""
    message: str


class Listed(BaseModel):
    requests: list[Answer]
    total_count: int
    status_filter: str | None


class Engine(BaseModel):
    replica: str
    state: str
    """'' if it is wanted and not heard of."""
    version: int
    step: int
    progress: int
    host: str
    pid: int
    engine_url: str
    """'' for an engine of its own."""
    launched: bool
    """A launcher of the run keeps it alive."""
    leaving: bool
    gone: str
    """Why its launcher does not start it again."""
    detail: dict[str, Any]


class Replicas(BaseModel):
    role: str
    num_replicas: int
    """What targets count: those with an engine of their own, there or on their way."""
    engines: list[Engine]


def router(scaler: Scaler) -> APIRouter:
    routes = APIRouter()

    @routes.post("/{role}/scale_out", status_code=202)
    async def scale_out(role: Role, body: ScaleOut, response: Response, key: Key = None) -> Answer:
        """Start replicas, or register engines elsewhere. 202 for a new operation, 200 for a repeated request."""
        return await _scale_out(scaler, role, body, response, key)

    @routes.post("/{role}/engines", status_code=202)
    async def register(role: Role, body: Engines, response: Response, key: Key = None) -> Answer:
        """Register SGLang servers that run elsewhere."""
        fields = body.model_dump(exclude={"urls"})
        return await _scale_out(scaler, role, ScaleOut(engine_urls=body.urls, **fields), response, key)

    @routes.post("/{role}/scale_in", status_code=202)
    async def scale_in(role: Role, body: ScaleIn, response: Response, key: Key = None) -> Answer:
        """Let replicas drain and leave: the newest first, unless they are named."""
        return await _scale_in(scaler, role, body, response, key)

    for kind, path in (("out", "scale_out"), ("in", "scale_in")):
        _reading(routes, scaler, kind, path)

    @routes.get("/{role}/engines")
    async def engines(role: Role) -> Replicas:
        """The replicas of a role, and those that are wanted and not there."""
        return await _engines(scaler, role)

    return routes


async def _scale_out(scaler: Scaler, role: str, body: ScaleOut, response: Response, key: str | None) -> Answer:
    _one_of(num_replicas=body.num_replicas, engine_urls=body.engine_urls or None)
    if body.engine_urls and role != "rollout":
        raise HTTPException(400, f"engine_urls: engines elsewhere can be rollouts, not {role}")
    key = key or body.idempotency_key
    if not scaler.knows(key) and not await scaler.can_launch():
        raise HTTPException(409, NOBODY)
    keep = body.partial_success_policy == "keep_partial"
    fields = {"target": body.num_replicas, "urls": body.engine_urls, "keep_partial": keep}
    timeout_s = body.timeout_secs or OUT_TIMEOUT_S
    return await _submit(scaler, response, "out", role, key, timeout_s=timeout_s, **fields)


async def _scale_in(scaler: Scaler, role: str, body: ScaleIn, response: Response, key: str | None) -> Answer:
    _one_of(num_replicas=body.num_replicas, replicas=body.replicas or None, engine_urls=body.engine_urls or None)
    timeout_s = body.timeout_secs or scaler.drain_s
    fields: dict[str, Any] = {"target": body.num_replicas, "urls": body.engine_urls, "names": body.replicas}
    fields["force"] = body.force
    if body.dry_run:
        response.status_code = 200
        trial = Operation("", "in", role, "", 0, 0.0, timeout_s, **fields)
        return answer(operation.advance(trial, await scaler.seen(), (), 0.0))
    return await _submit(scaler, response, "in", role, key or body.idempotency_key, timeout_s=timeout_s, **fields)


def _reading(routes: APIRouter, scaler: Scaler, kind: str, path: str) -> None:
    @routes.get(f"/{{role}}/{path}", name=f"list_{path}")
    async def listed(role: Role, status: str | None = None, model_name: Literal["default"] = MODEL) -> Listed:
        """Operations, the newest first."""
        if status is not None and status not in STATES:
            raise HTTPException(400, f"status: {status!r} is none of {', '.join(sorted(STATES))}")
        found = [answer(one) for one in scaler.listed(kind, role, status)]
        return Listed(requests=found, total_count=len(found), status_filter=status)

    @routes.get(f"/{{role}}/{path}/{{request_id}}", name=f"get_{path}")
    async def get(role: Role, request_id: str) -> Answer:
        """One operation."""
        return answer(_known(scaler, kind, role, request_id))

    @routes.post(f"/{{role}}/{path}/{{request_id}}/cancel", name=f"cancel_{path}")
    async def cancel(role: Role, request_id: str) -> Answer:
        """Take it back: newcomers leave, who was to leave stays. 409 where it is too late; may be repeated."""
        _known(scaler, kind, role, request_id)
        try:
            return answer(await scaler.cancel(request_id))
        except ValueError as error:
            raise HTTPException(409, str(error)) from error


async def _submit(scaler: Scaler, response: Response, kind: str, role: str, key: str | None, **fields: Any) -> Answer:
    try:
        one, new = await scaler.submit(kind, role, key, **fields)
    except KeyReused as error:
        raise HTTPException(409, str(error)) from error
    response.status_code = 202 if new else 200
    return answer(one)


def _known(scaler: Scaler, kind: str, role: str, request_id: str) -> Operation:
    one = scaler.operations.get(request_id)
    if one is None or one.kind != kind or one.role != role:
        raise HTTPException(404, f"no scale_{kind} of {role} has the id {request_id!r}")
    return one


def _one_of(**fields: Any) -> None:
    if sum(value is not None for value in fields.values()) != 1:
        raise HTTPException(400, f"give exactly one of {', '.join(fields)}")


async def _engines(scaler: Scaler, role: str) -> Replicas:
    seen = await scaler.seen()
    wanted = seen.wanted
    names = {*wanted.of(role), *(name for name, beat in seen.beats.items() if beat.service == role)}
    found = []
    for name in sorted(names, key=operation.natural):
        beat, spec = seen.beats.get(name), wanted.replicas.get(name, {})
        found.append(
            Engine(
                replica=name,
                state=beat.state if beat else "",
                version=beat.version if beat else -1,
                step=beat.step if beat else -1,
                progress=beat.progress if beat else 0,
                host=beat.host if beat else "",
                pid=beat.pid if beat else 0,
                engine_url=spec.get("engine_url", ""),
                launched=name in wanted.replicas,
                leaving=name in wanted.leaving or name in wanted.killed,
                gone=seen.gone.get(name, ""),
                detail=beat.detail if beat else {},
            )
        )
    return Replicas(role=role, num_replicas=len(seen.natives(role)), engines=found)


def answer(one: Operation) -> Answer:
    """As the API tells of it."""
    out = one.kind == "out"
    return Answer(
        request_id=one.id,
        kind=f"scale_{one.kind}",
        role=one.role,
        status=one.status,
        model_name=MODEL,
        target=one.target,
        num_replicas=len(one.specs),
        engine_urls=one.urls,
        engine_ids=one.staying if out else [],
        selected_engines=[] if out else list(one.specs),
        removed_engines=one.removed,
        failed_engines=one.errors,
        force=one.force,
        timeout_secs=one.timeout_s,
        weight_version=one.version if one.version >= 0 else None,
        created_at=one.created,
        updated_at=one.updated,
        seconds=one.reached,
        first_trained_secs=one.first_trained,
        message=one.message,
    )
