"""The HTTP contract of an inference engine, as the rollout worker speaks it: SGLang's endpoints, ours or SGLang's own server.

Guarantees: every call has a deadline (`EngineTimeout`); a refusal is an `EngineError` with the engine's own words; an engine
that is not there, goes away during a call or says that its model has died is `EngineDead`. Torch-free. Endpoints that an older
SGLang does not have (404 on begin_weight_update and end_weight_update) count as "not needed".
tests/rollout/test_engine_client.py is its check.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import aiohttp

from services.dcs.handles import Place

CONTROL_TIMEOUT_S = 30.0
"""Deadline of calls that move no weights and generate nothing."""
WEIGHTS_TIMEOUT_S = 300.0
GENERATE_TIMEOUT_S = 600.0
KEEP_ALIVE_S = 2.0
"""Shorter than any server's own (uvicorn's is 5 s): a connection that the server is closing must not look like a dead engine."""
MARGIN_S = 10.0
"""What a call may take beyond a deadline that the engine itself keeps."""

PauseMode = Literal["abort", "retract", "in_place"]
SwitchMode = Literal["retract", "in_place"]
MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]


class EngineError(RuntimeError):
    """The engine answered, and the answer is a refusal or a failure. `status` is the HTTP status (0: there was none)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class EngineTimeout(EngineError):
    """No answer in time. The engine may be alive and may even have done what was asked."""


class EngineDead(EngineError):
    """The engine cannot be reached, went away during the call, or says that its model has died: start it again."""


class Tensor(Protocol):
    """What has to be known of a tensor before its bytes arrive (`services.dcs.digest.TensorSpec` fits)."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Checksums:
    """Of the staged weights while an update is open and has received some, else of the live ones."""

    tensors: dict[str, str]
    digest: str
    staged: bool


class EngineClient:
    """`async with EngineClient(url) as engine`, or `close()` it."""

    def __init__(self, url: str, timeout_s: float = CONTROL_TIMEOUT_S, vocab: int | None = None) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.vocab = vocab
        """Size of the model's vocabulary. Ids beyond it are refused here: SGLang's server dies of them."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ---- generation

    async def generate(self, body: dict[str, Any], timeout_s: float = GENERATE_TIMEOUT_S) -> list[dict[str, Any]]:
        """POST /generate. Always a list: one answer a prompt and sample. Raises EngineError, EngineTimeout, EngineDead."""
        if self.vocab is not None:
            _check_ids(body.get("input_ids"), self.vocab)
        answer = await self._post("/generate", body, timeout_s)
        return answer if isinstance(answer, list) else [answer]

    async def abort(self, rid: str = "", everything: bool = False) -> None:
        """End the request `rid`, or all; their own answers come back with what they have. An engine may take along those whose
        rid begins with it, so no rid should be the beginning of another."""
        await self._post("/abort_request", {"rid": rid, "abort_all": everything})

    async def pause(self, mode: PauseMode = "abort") -> None:
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def flush_cache(self) -> None:
        await self._post("/flush_cache", {})

    async def release_memory(self, tags: Iterable[MemoryTag] = ()) -> None:
        """Give the device's memory back to whoever shares it (all of it, or what `tags` name). Needs an engine that is idle or
        paused; the cache is flushed. Released weights are gone: after `resume_memory` an update has to bring all of them."""
        await self._post("/release_memory_occupation", _given(tags=list(tags) or None))

    async def resume_memory(self, tags: Iterable[MemoryTag] = ()) -> None:
        """Take it again, with the tags that were released."""
        await self._post("/resume_memory_occupation", _given(tags=list(tags) or None))

    # ---- state

    async def ready(self) -> bool:
        """Serving and not paused. False also when nothing listens: meant for waiting until an engine is up."""
        try:
            await self._request("GET", "/ready", None, self.timeout_s)
        except EngineDead:
            return False
        except EngineError as error:
            if error.status == 404:  # SGLang before 0.5.20
                return await self.healthy()
            return False
        return True

    async def healthy(self) -> bool:
        """The engine makes steps. May be False for an SGLang server that is paused."""
        try:
            return await self.steps(self.timeout_s)
        except EngineDead:
            return False

    async def steps(self, timeout_s: float) -> bool:
        """As `healthy`, with a deadline of its own; EngineDead if nothing listens."""
        try:
            await self._request("GET", "/health", None, timeout_s)
        except EngineDead:
            raise
        except EngineError:
            return False
        return True

    async def answers(self) -> bool:
        """It says something in time, whatever that is. Raises EngineDead if nothing listens."""
        try:
            await self._request("GET", "/ready", None, self.timeout_s)
        except EngineTimeout:
            return False
        except EngineDead:
            raise
        except EngineError:
            return True  # a refusal is an answer
        return True

    async def model_info(self) -> dict[str, Any]:
        return await self._get("/model_info", older="/get_model_info")

    async def server_info(self) -> dict[str, Any]:
        return await self._get("/server_info", older="/get_server_info")

    async def load(self) -> dict[str, Any]:
        """`num_running_reqs`, `num_waiting_reqs`, `num_used_tokens`, `max_total_num_tokens` and whatever else it tells."""
        answer = await self._get("/v1/loads", older="/get_load")
        loads = answer["loads"] if isinstance(answer, dict) else answer
        return loads[0]

    # ---- weights

    async def begin_update(self) -> bool:
        """Open a weight update. False: this SGLang is older and needs none."""
        return await self._optional("/begin_weight_update", {})

    async def end_update(
        self, commit: bool = True, weight_version: str | None = None, mode: SwitchMode | None = None
    ) -> bool:
        """Close the update. Only the light engine stages: `commit` False drops, `mode` says what happens to running requests."""
        body: dict[str, Any] = {} if commit else {"commit": False}
        body |= _given(weight_version=weight_version, mode=mode)
        return await self._optional("/end_weight_update", body, WEIGHTS_TIMEOUT_S)

    async def init_group(
        self, host: str, port: int, rank: int, world_size: int, group_name: str, backend: str, timeout_s: float
    ) -> None:
        """Join a broadcast group; returns when all of its members have joined."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": rank,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
            "timeout_s": timeout_s,  # SGLang ignores what it does not know
        }
        await self._post("/init_weights_update_group", body, timeout_s + MARGIN_S)

    async def destroy_group(self, group_name: str, timeout_s: float = WEIGHTS_TIMEOUT_S) -> None:
        await self._post("/destroy_weights_update_group", {"group_name": group_name}, timeout_s)

    async def update_from_distributed(
        self,
        tensors: Iterable[Tensor],
        group_name: str,
        *,
        bucket: bool = True,
        weight_version: str | None = None,
        flush_cache: bool = False,
        timeout_s: float = WEIGHTS_TIMEOUT_S,
    ) -> None:
        """Receive what rank 0 of the group broadcasts: one uint8 bucket of all bytes, or tensor by tensor. SGLang's own call."""
        body = _columns(tensors) | {
            "group_name": group_name,
            "load_format": "flattened_bucket" if bucket else None,
            "flush_cache": flush_cache,
        }
        await self._post(
            "/update_weights_from_distributed", body | _given(weight_version=weight_version), timeout_s + MARGIN_S
        )

    async def update_from_buckets(
        self, buckets: Sequence[tuple[str, Sequence[Tensor]]], timeout_s: float = WEIGHTS_TIMEOUT_S
    ) -> None:
        """Receive a whole transfer: (group, tensors) of each uint8 bucket, in the order of sending. Rank 0 of each group
        broadcasts, and has to begin within STALLED_S (services/dcs/collective.py) of the bucket's turn. Only engines that stage.
        """
        body = _columns(tensor for _, tensors in buckets for tensor in tensors) | {
            "buckets": [(group, len(tensors)) for group, tensors in buckets],
            "load_format": "flattened_bucket",
            "timeout_s": timeout_s,
        }
        await self._post("/update_weights_from_distributed", body, timeout_s + MARGIN_S)

    async def update_from_shared(
        self,
        tensors: Iterable[Tensor],
        segment: Place,
        weight_version: str | None = None,
        timeout_s: float = WEIGHTS_TIMEOUT_S,
    ) -> None:
        """Take a bucket of all these tensors out of memory that the trainer shares: a segment of this name, or device memory with
        this handle (services/dcs/handles.py). Only engines that stage."""
        body = _columns(tensors) | {"segment": segment}
        await self._post("/update_weights_from_shared", body | _given(weight_version=weight_version), timeout_s)

    async def update_from_tensor(
        self, serialized: list[str], weight_version: str | None = None, timeout_s: float = WEIGHTS_TIMEOUT_S
    ) -> None:
        """Light engine: safetensors bytes in base64. SGLang: its own pickles, one a tensor-parallel rank."""
        body = {"serialized_named_tensors": serialized, "flush_cache": False} | _given(weight_version=weight_version)
        await self._post("/update_weights_from_tensor", body, timeout_s)

    async def update_from_disk(
        self,
        folder: str,
        weight_version: str | None = None,
        *,
        flush_cache: bool = True,
        mode: SwitchMode | None = None,
        timeout_s: float = WEIGHTS_TIMEOUT_S,
    ) -> None:
        """Load a Hugging Face folder: at once, or (light engine) into the open update."""
        body = {"model_path": folder, "flush_cache": flush_cache} | _given(weight_version=weight_version, mode=mode)
        await self._post("/update_weights_from_disk", body, timeout_s)

    async def checksums(self, timeout_s: float = WEIGHTS_TIMEOUT_S) -> Checksums:
        answer = await self._post("/weights_checker", {"action": "checksum"}, timeout_s)
        ranks = answer.get("ranks") or [{}]
        return Checksums(
            ranks[0].get("checksums", {}), answer.get("per_engine_checksum", ""), bool(answer.get("staged"))
        )

    async def set_version(self, version: str, abort_all: bool = False) -> None:
        """Relabel the live weights."""
        await self._post("/update_weight_version", {"new_version": version, "abort_all_requests": abort_all})

    # ---- HTTP

    async def _get(self, path: str, older: str) -> Any:
        try:
            return await self._request("GET", path, None, self.timeout_s)
        except EngineError as error:
            if error.status != 404:
                raise
        return await self._request("GET", older, None, self.timeout_s)

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        return await self._request("POST", path, body, timeout_s or self.timeout_s)

    async def _optional(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> bool:
        try:
            await self._post(path, body, timeout_s)
        except EngineError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def _request(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, self.url + path, json=body, timeout=timeout) as response:
                raw = await response.read()
                status = response.status
        except asyncio.TimeoutError as error:  # noqa: UP041 - aiohttp's own time-outs derive from this one
            raise EngineTimeout(504, f"{method} {self.url}{path}: no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDead(
                0, f"{method} {self.url}{path}: the engine is gone ({error or type(error).__name__})"
            ) from error
        return _answer(f"{method} {self.url}{path}", status, raw, path in ("/ready", "/health"))


def _answer(call: str, status: int, raw: bytes, is_probe: bool) -> Any:
    value: Any = None
    if raw:
        try:
            value = json.loads(raw)
        except ValueError:
            value = raw.decode(errors="replace")
    if status == 200:
        if isinstance(value, dict) and value.get("success") is False:
            raise EngineError(status, f"{call}: {_message(value)}")
        return value
    kind = EngineDead if status == 503 and not is_probe else EngineError
    raise kind(status, f"{call}: HTTP {status}: {_message(value)}")


def _check_ids(prompts: Any, vocab: int) -> None:
    """Raises EngineError for an id that the model does not have. Whatever else is wrong is the engine's to say."""
    flat = prompts if isinstance(prompts, list) else []
    for prompt in flat if flat and isinstance(flat[0], list) else [flat]:
        wrong = next((token for token in prompt if not 0 <= token < vocab), None)
        if wrong is not None:
            raise EngineError(
                400, f"input_ids: id {wrong} is outside the vocabulary of {vocab}; was another tokenizer used?"
            )


def _message(value: Any) -> str:
    """What an engine says went wrong, in whichever of its three forms."""
    if isinstance(value, dict):
        error = value.get("error")
        value = value.get("message") or (error.get("message") if isinstance(error, dict) else error) or value
    return str(value)[:2000]


def _columns(tensors: Iterable[Tensor]) -> dict[str, Any]:
    """How tensors are announced."""
    listed = list(tensors)
    return {
        "names": [tensor.name for tensor in listed],
        "dtypes": [tensor.dtype for tensor in listed],
        "shapes": [list(tensor.shape) for tensor in listed],
    }


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
