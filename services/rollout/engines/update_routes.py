"""SGLang's endpoints for weight updates, over `Weights`: a path and a JSON body in, a JSON object out, whatever the HTTP server.

The light engine's server and the hooks inside SGLang both serve exactly these. `update_weights_from_distributed` has two fields
of its own: `buckets`, a list of [group_name, number_of_tensors] in the order of sending, asks for a whole transfer in one call
(names, dtypes and shapes are those of all buckets one after another), and `timeout_s` is its deadline. A refusal is raised
(`BadRequest`, `UpdateError`), and `refusal` phrases as SGLang does. tests/contract/test_updates.py.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, Protocol

from services.dcs.handles import Place
from services.rollout.engines.fields import BadRequest, Fields

BUCKET = "flattened_bucket"
DEFAULT_GROUP = "weight_update_group"
"""SGLang's own name for a group that is given none."""
DISK_IGNORED = ("flush_cache", "torch_empty_cache", "load_format", "is_async", "keep_pause", "token_step")

Answer = dict[str, Any]
Mode = Literal["retract", "in_place"]


class Weights(Protocol):
    """What an engine does for these calls. Refusals are raised."""

    async def begin(self) -> None: ...

    async def end(self, commit: bool, version: str | None, mode: Mode | None) -> int: ...

    async def join(
        self, host: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
    ) -> None: ...

    async def leave(self, name: str) -> None: ...

    async def from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        buckets: list[tuple[str, int]],
        flat: bool,
        version: str | None,
        timeout_s: float | None,
    ) -> None: ...

    async def from_shared(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], segment: Place, version: str | None
    ) -> None: ...

    async def from_tensor(self, serialized: list[str], version: str | None) -> None: ...

    async def from_disk(self, folder: Path, version: str | None, mode: Mode | None) -> int: ...

    async def checksums(self) -> dict[str, Any]: ...


def done(message: str, **more: Any) -> Answer:
    return {"success": True, "message": message, **more}


def refusal(error: Exception) -> Answer:
    return {"success": False, "message": str(error), "error": {"message": str(error)}}


class UpdateRoutes:
    """`routes`: path -> handler. `abort_all` ends every request of the engine with what it has, `version` is that of the live
    weights."""

    def __init__(
        self, weights: Weights, abort_all: Callable[[], Awaitable[None]], version: Callable[[], str | None]
    ) -> None:
        self._weights, self._abort, self._version = weights, abort_all, version
        self.routes: dict[str, Callable[[Any], Awaitable[Answer]]] = {
            "/weights_checker": self.checksums,
            "/begin_weight_update": self.begin,
            "/end_weight_update": self.end,
            "/init_weights_update_group": self.join,
            "/destroy_weights_update_group": self.leave,
            "/update_weights_from_distributed": self.from_distributed,
            "/update_weights_from_shared": self.from_shared,
            "/update_weights_from_tensor": self.from_tensor,
            "/update_weights_from_disk": self.from_disk,
        }

    async def begin(self, body: Any) -> Answer:
        Fields(body, "begin_weight_update").end()
        await self._weights.begin()
        return done("a weight update is open")

    async def end(self, body: Any) -> Answer:
        fields = Fields(body, "end_weight_update")
        commit, version = fields.flag("commit", True), fields.text("weight_version", None)
        mode = fields.choice("mode", ("retract", "in_place"), None)
        fields.end()
        started = time.perf_counter()
        met = await self._weights.end(commit, version, mode)
        message = "the staged weights are live" if commit else "the staged weights are dropped"
        seconds = time.perf_counter() - started
        return done(message, weight_version=self._version(), num_paused_requests=met, seconds=seconds)

    async def checksums(self, body: Any) -> Answer:
        fields = Fields(body, "weights_checker", ignored=("allow_quant_error", "skip_tensor_list"))
        fields.choice("action", ("checksum",), "checksum")
        fields.end()
        found = await self._weights.checksums()
        rank = {"checksums": found["checksums"], "per_gpu_checksum": found["digest"]}
        return done(
            "checksums of the staged weights" if found["staged"] else "checksums of the live weights",
            ranks=[rank],
            per_engine_checksum=found["digest"],
            staged=found["staged"],
        )

    async def join(self, body: Any) -> Answer:
        fields = Fields(body, "init_weights_update_group")
        host, port = fields.text("master_address"), int(fields.number("master_port"))
        rank, world_size = int(fields.number("rank_offset")), int(fields.number("world_size"))
        name, backend = fields.text("group_name", DEFAULT_GROUP), fields.choice("backend", ("gloo", "nccl"), "nccl")
        timeout_s = float(fields.number("timeout_s", 120))
        fields.end()
        await self._weights.join(host, port, rank, world_size, name, backend, timeout_s)
        return done("joined")

    async def leave(self, body: Any) -> Answer:
        fields = Fields(body, "destroy_weights_update_group")
        name = fields.text("group_name", DEFAULT_GROUP)
        fields.end()
        await self._weights.leave(name)
        return done("left")

    async def from_distributed(self, body: Any) -> Answer:
        fields = Fields(body, "update_weights_from_distributed", ignored=("flush_cache", "torch_empty_cache"))
        names, dtypes, shapes = fields.items("names", str), fields.items("dtypes", str), fields.items("shapes", list)
        load_format = fields.choice("load_format", (BUCKET,), None)
        buckets = _buckets(fields, load_format, len(names))
        version, abort = fields.text("weight_version", None), fields.flag("abort_all_requests", False)
        timeout_s = fields.number("timeout_s", None)
        fields.end()
        await self._abort_all(abort)
        flat = load_format == BUCKET
        await self._weights.from_distributed(names, dtypes, shapes, buckets, flat, version, timeout_s)
        return done(f"{len(names)} tensors are staged")

    async def from_shared(self, body: Any) -> Answer:
        fields = Fields(body, "update_weights_from_shared")
        names, dtypes, shapes = fields.items("names", str), fields.items("dtypes", str), fields.items("shapes", list)
        segment, version = fields.place("segment"), fields.text("weight_version", None)
        fields.end()
        await self._weights.from_shared(names, dtypes, shapes, segment, version)
        return done(f"{len(names)} tensors are staged")

    async def from_tensor(self, body: Any) -> Answer:
        fields = Fields(body, "update_weights_from_tensor", ignored=("flush_cache", "load_format"))
        serialized, version = fields.items("serialized_named_tensors", str), fields.text("weight_version", None)
        abort = fields.flag("abort_all_requests", False)
        fields.end()
        await self._abort_all(abort)
        await self._weights.from_tensor(serialized, version)
        return done("the tensors are staged")

    async def from_disk(self, body: Any) -> Answer:
        fields = Fields(body, "update_weights_from_disk", ignored=DISK_IGNORED)
        folder, version = Path(fields.text("model_path")), fields.text("weight_version", None)
        abort, mode = fields.flag("abort_all_requests", False), fields.choice("mode", ("retract", "in_place"), None)
        fields.end()
        await self._abort_all(abort)
        met = await self._weights.from_disk(folder, version, mode)
        return done("loaded", weight_version=self._version(), num_paused_requests=met)

    async def _abort_all(self, wanted: bool) -> None:
        if wanted:
            await self._abort()


def _buckets(fields: Fields, load_format: str | None, tensors: int) -> list[tuple[str, int]]:
    """(group, number of tensors) of each: as `buckets` tells, or all in one of `group_name`, which is SGLang's own call."""
    listed = fields.items("buckets", list, None)
    if listed is None:
        return [(fields.text("group_name", DEFAULT_GROUP), tensors)]
    if load_format != BUCKET:
        raise BadRequest(f"buckets: needs load_format {BUCKET!r}")
    for pair in listed:
        if [type(part) for part in pair] != [str, int] or pair[1] < 1:
            raise BadRequest(f"buckets: {pair!r} is not [group_name, number_of_tensors]")
    return [(group, count) for group, count in listed]
