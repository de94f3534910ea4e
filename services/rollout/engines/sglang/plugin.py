"""What is hooked into SGLang, through its own registry of plug-ins, in every process of the server.

* weights are received and verified beside the running model, under their Hugging Face names (bridge.py): on any device;
* on a CPU, where the stand-ins are asked for: padded attention (attention.py), for speed.

`register` is called by serve.py, and by SGLang itself where this distribution is installed beside it (entry point
`sglang.srt.plugins`): that is how a server that somebody else starts gets the same endpoints. docs/sglang.md has the table.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from services.rollout.engines.sglang.command import HOOKS, STANDINS

log = logging.getLogger(__name__)

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
"""Dense models whose layers views.py knows. Servers of others keep SGLang's own endpoints."""
CONTROLS = (
    "/weights_checker",
    "/begin_weight_update",
    "/end_weight_update",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_shared",
    "/update_weights_from_tensor",
    "/update_weights_from_disk",
)
_registered = False


def register() -> None:
    """Register all hooks; once a process."""
    global _registered
    if _registered:
        return
    _registered = True
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get(HOOKS) != "0":
        _register_updates(HookRegistry, HookType)
    if os.environ.get(STANDINS) == "1":
        _register_cpu(HookRegistry, HookType)


def _register_updates(registry: Any, kinds: Any) -> None:
    from services.rollout.engines.sglang import bridge

    updater = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    registry.register(f"{updater}.check_weights", bridge.check_weights, kinds.AROUND)
    registry.register("sglang.srt.entrypoints.http_server._setup_and_run_http_server", mount, kinds.BEFORE)


def _register_cpu(registry: Any, kinds: Any) -> None:
    from services.rollout.engines.sglang import attention

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    registry.register(f"{backend}._run_sdpa_forward_decode", attention.decode, kinds.AROUND)
    registry.register(f"{backend}._run_sdpa_forward_extend", attention.extend, kinds.AROUND)


def stages(args: Any, architectures: list[str]) -> bool:
    """Whether this server can take tensors by name. `args`: SGLang's ServerArgs."""
    single = args.dp_size == 1 and args.pp_size == 1 and args.tokenizer_worker_num == 1
    plain = args.quantization is None and args.speculative_algorithm is None
    return single and plain and any(name in ARCHITECTURES for name in architectures)


def mount(server_args: Any, tokenizer_manager: Any, *_: Any, **__: Any) -> None:
    """Before the HTTP server starts: our endpoints in front of SGLang's own of the same paths, under the same access rules."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.routing import Route

    architectures = list(getattr(tokenizer_manager.model_config.hf_config, "architectures", None) or [])
    if not stages(server_args, architectures):
        log.warning("slipstream: no staged updates for %s with these options; SGLang's own are served", architectures)
        return
    controls = Controls(tokenizer_manager, http_server.server_info)
    auth_level(AuthLevel.ADMIN_OPTIONAL)(Controls.control)
    added = [Route(path, controls.control, methods=["POST"]) for path in CONTROLS]
    added += [Route(path, controls.info, methods=["GET"]) for path in ("/server_info", "/get_server_info")]
    http_server.app.router.routes[:0] = added


class Controls:
    """The endpoints, in the HTTP process."""

    def __init__(self, tokenizer_manager: Any, server_info: Any) -> None:
        from services.rollout.engines.sglang.bridge import Caller

        self._manager, self._server_info = tokenizer_manager, server_info
        self._caller = Caller(self._send)

    async def _send(self, text: str) -> tuple[bool, str]:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        from services.rollout.engines.sglang.bridge import ACTION

        told = await self._manager.check_weights(CheckWeightsReqInput(action=ACTION, skip_tensor_list=[text]))
        return bool(told[0]), str(told[1])

    async def control(self, request: Any) -> Any:
        from starlette.responses import JSONResponse

        raw = await request.body()
        try:
            body = json.loads(raw) if raw else {}
        except ValueError as error:
            message = f"the body is not JSON: {error}"
            return JSONResponse({"success": False, "message": message, "error": {"message": message}}, 400)
        if isinstance(body, dict) and body.pop("abort_all_requests", False):
            self._manager.abort_request(abort_all=True)
        status, answer = await self._caller.call(request.url.path, body)
        if status == 200 and answer.get("weight_version") is not None:
            self._manager._update_weight_version_if_provided(answer["weight_version"])
        return JSONResponse(answer, status)

    async def info(self, request: Any) -> Any:
        from fastapi.encoders import jsonable_encoder
        from starlette.responses import JSONResponse

        del request
        told = dict(await self._server_info())
        return JSONResponse(jsonable_encoder(told | {"engine": "sglang", "staged_updates": True}))
