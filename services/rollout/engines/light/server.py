"""The engine's HTTP face: SGLang's endpoints and fields over `Engine` and `Weights`.

Handlers parse, hand over and format; all work happens in the scheduler's or the weights' thread, so that the loop is always
free to answer. Refusals are HTTP 400 with `{"success": false, "message": ...}`, a dead model 503. A client that goes away aborts
its requests. tests/rollout/test_light_server.py runs the contract over real HTTP.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from aiohttp import web

from services.rollout.engines.fields import BadRequest, Fields
from services.rollout.engines.light.engine import Engine
from services.rollout.engines.light.protocol import answer, parse_generate
from services.rollout.engines.light.scheduler import SchedulerDead
from services.rollout.engines.light.weights import Weights
from services.rollout.engines.receiving import UpdateError
from services.rollout.engines.update_routes import UpdateRoutes, refusal
from services.rollout.engines.update_routes import done as success
from shared.allocator import give_back_freed_blocks

HEALTH_TIMEOUT_S = 20.0
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")
MAX_BODY = 1 << 31
"""Weights may come over HTTP."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def reply(value: Any, status: int = 200) -> web.Response:
    return web.Response(text=dumps(value), status=status, content_type="application/json")


def done(message: str, **more: Any) -> web.Response:
    return reply(success(message, **more))


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors that are the caller's to hear, as SGLang phrases them."""
    try:
        return await handler(request)
    except (BadRequest, UpdateError) as error:
        return reply(refusal(error), 400)
    except SchedulerDead as error:
        return reply(refusal(error), 503)


class Server:
    """The routes, over one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.scheduler = engine.scheduler
        self.weights = Weights(engine.model, engine.scheduler)
        self.updates = UpdateRoutes(self.weights, self.abort_all, lambda: self.scheduler.version)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[errors], client_max_size=MAX_BODY)
        either = ("/health", self.health), ("/health_generate", self.health), ("/ready", self.ready)
        infos = ("/model_info", self.model_info), ("/get_model_info", self.model_info)
        servers = ("/server_info", self.server_info), ("/get_server_info", self.server_info)
        loads = (
            ("/v1/loads", self.loads),
            ("/get_load", self.load),
            ("/weights_checker", self.update(self.updates.checksums)),
        )
        app.add_routes([web.get(path, handler) for path, handler in (*either, *infos, *servers, *loads)])
        posts: dict[str, Handler] = {
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/flush_cache": self.flush_cache,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
            "/update_weight_version": self.update_version,
        }
        posts |= {path: self.update(call) for path, call in self.updates.routes.items()}
        app.add_routes([web.post(path, handler) for path, handler in posts.items()])
        return app

    async def in_scheduler(self, function: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.scheduler.call(function))

    # ---- state

    async def health(self, request: web.Request) -> web.Response:
        """200 if the model's thread answers between two steps; holds while paused too."""
        try:
            await asyncio.wait_for(self.in_scheduler(lambda: None), HEALTH_TIMEOUT_S)
        except TimeoutError:
            return reply({"message": f"no step ended within {HEALTH_TIMEOUT_S:.0f} s"}, 503)
        return web.Response()

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.scheduler.alive and not self.scheduler.paused else 503)

    async def model_info(self, request: web.Request) -> web.Response:
        config = self.engine.model.config
        return reply(
            {
                "model_path": str(self.engine.options.model),
                "tokenizer_path": str(self.engine.options.model),
                "is_generation": True,
                "weight_version": self.scheduler.version,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "architectures": [config.architecture],
            }
        )

    async def server_info(self, request: web.Request) -> web.Response:
        options, limits = self.engine.options, self.engine.limits
        return reply(
            {
                "engine": "light",
                "version": _version(),
                "staged_updates": True,
                "last_switch": self.scheduler.last_switch,
                "model_path": str(options.model),
                "device": str(self.engine.model.device),
                "dtype": str(self.engine.model.dtype).removeprefix("torch."),
                "context_length": limits.context_length,
                "max_total_num_tokens": limits.max_total_tokens,
                "max_running_requests": options.max_running_requests,
                "vocab_size": limits.vocab,
                "skip_tokenizer_init": True,
            }
        )

    def _load(self) -> dict[str, Any]:
        scheduler = self.scheduler
        running, waiting = len(scheduler.batch), len(scheduler.waiting)
        used = running * scheduler.cache.length
        return {
            "dp_rank": 0,
            "num_reqs": running + waiting,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_tokens": used,
            "num_used_tokens": used,
            "max_total_num_tokens": scheduler.cache.capacity,
            "token_usage": used / scheduler.cache.capacity,
            "generated_tokens_total": scheduler.generated,
        }

    async def loads(self, request: web.Request) -> web.Response:
        return reply({"timestamp": time.time(), "version": _version(), "dp_rank_count": 1, "loads": [self._load()]})

    async def load(self, request: web.Request) -> web.Response:
        return reply([self._load()])

    # ---- generation

    async def generate(self, request: web.Request) -> web.Response:
        started = time.perf_counter()
        parsed = parse_generate(await _json(request), self.engine.limits)
        finished = asyncio.wrap_future(self.scheduler.submit(parsed.sequences))
        try:
            await asyncio.shield(finished)
        except asyncio.CancelledError:
            mine = {id(sequence) for sequence in parsed.sequences}
            self.scheduler.call(lambda: self.scheduler.abort(lambda s: id(s) in mine, "the client went away"))
            raise
        seconds = time.perf_counter() - started
        answers = [answer(sequence, self.scheduler.version, seconds) for sequence in parsed.sequences]
        return reply(answers if parsed.as_list else answers[0])

    async def abort_request(self, request: web.Request) -> web.Response:
        fields = Fields(await _json(request), "abort_request")
        rid, everything, message = (
            fields.text("rid", ""),
            fields.flag("abort_all", False),
            fields.text("abort_message", None),
        )
        fields.end()
        if not rid and not everything:
            raise BadRequest("rid: name a request (rids match by prefix), or set abort_all")
        text = message or "aborted by abort_request"
        await self.in_scheduler(lambda: self.scheduler.abort(lambda s: everything or s.rid.startswith(rid or ""), text))
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        fields = Fields(await _json(request), "pause_generation")
        mode = fields.choice("mode", ("abort", "retract", "in_place"), "abort")
        fields.end()
        await self.in_scheduler(lambda: self.scheduler.pause(mode))
        return done("paused")

    async def continue_generation(self, request: web.Request) -> web.Response:
        Fields(await _json(request), "continue_generation", ignored=("torch_empty_cache",)).end()
        await self.in_scheduler(self.scheduler.resume)
        return done("continued")

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Nothing is kept between requests, so this only tells, as SGLang does, whether all is idle."""

        def busy() -> int:
            waiting = 0 if self.scheduler.paused == "retract" else len(self.scheduler.waiting)
            return len(self.scheduler.batch) + waiting

        count = await self.in_scheduler(busy)
        if count:
            raise BadRequest(f"flush_cache: {count} requests are running or waiting")
        return done("flushed")

    async def release_memory(self, request: web.Request) -> web.Response:
        """Of the cache, and of the weights, which do not come back by themselves. What is asked for meanwhile waits."""
        tags = _tags(await _json(request), "release_memory_occupation")
        if "kv_cache" in tags and not await self.in_scheduler(self.scheduler.release):
            raise BadRequest("release_memory_occupation: requests are running; pause with mode retract first")
        if "weights" in tags:
            await self.weights.release()
        give_back_freed_blocks()
        if self.engine.model.device.type == "cuda":
            torch.cuda.empty_cache()
        return reply(None)

    async def resume_memory(self, request: web.Request) -> web.Response:
        """Take it again. Nothing is generated before an update has brought the weights, if these were released."""
        tags = _tags(await _json(request), "resume_memory_occupation")
        if "weights" in tags:
            await self.weights.take()
        if "kv_cache" in tags:
            await self.in_scheduler(self.scheduler.take)
        return reply(None)

    # ---- weights

    def update(self, call: Callable[[Any], Awaitable[dict[str, Any]]]) -> Handler:
        async def handler(request: web.Request) -> web.Response:
            return reply(await call(await _json(request)))

        return handler

    async def update_version(self, request: web.Request) -> web.Response:
        fields = Fields(await _json(request), "update_weight_version")
        version, abort = fields.text("new_version"), fields.flag("abort_all_requests", True)
        fields.end()
        if abort:
            await self.abort_all()
        await self.in_scheduler(lambda: self.scheduler.relabel(version))
        return done("relabelled", new_version=version)

    async def abort_all(self) -> None:
        await self.in_scheduler(lambda: self.scheduler.abort(lambda _: True, "aborted by a weight update"))


def _tags(body: Any, call: str) -> list[str]:
    fields = Fields(body, call)
    tags = fields.items("tags", str) if body.get("tags") else list(MEMORY_TAGS)
    fields.end()
    if unknown := sorted(set(tags) - set(MEMORY_TAGS)):
        raise BadRequest(f"{call}: tags: {', '.join(unknown)} is none of {', '.join(MEMORY_TAGS)}")
    return list(tags)


async def _json(request: web.Request) -> Any:
    """The body; an empty one is an empty object, as SGLang takes it."""
    raw = await request.read()
    if not raw:
        return {}
    try:
        return json.loads(raw)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


def _version() -> str:
    try:
        return version("slipstream-rl")
    except PackageNotFoundError:
        return "source"
