"""The command that starts SGLang for a replica: native options under their own names, and what a replica needs besides.

Guarantees: an option of `rollout.sglang` wins over a default of ours; without a GPU (or with `rollout.device: cpu`) the server
gets what SGLang needs to run on a CPU, the stand-ins of standins.py included; with a GPU it is started natively. The
interpreter is `rollout.sglang_python`, else that of `make install-sglang`, else this process's own. Torch-free.
tests/rollout/test_sglang_command.py.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STANDINS = "SLIPSTREAM_SGLANG_STANDINS"
"""1: the server gets the stand-ins for SGLang's compiled kernels; only for a CPU."""
HOOKS = "SLIPSTREAM_SGLANG_HOOKS"
"""0: SGLang's own endpoints for weights, in place of ours."""
SOURCE_ROOT = Path(__file__).resolve().parents[4]
ENVIRONMENT = SOURCE_ROOT / ".venv-sglang/bin/python"
HOOKED, NATIVE = "services.rollout.engines.sglang.serve", "sglang.launch_server"
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")

ALWAYS: dict[str, Any] = {
    "skip_tokenizer_init": True,  # token ids in and out: the worker has the tokenizer
    "log_level": "warning",
}
ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",  # SGLang's own CPU kernels need AMX
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # else an idle scheduler takes half a core
    "max_total_tokens": 65536,  # else the KV cache takes 72 % of the memory
    "max_running_requests": 128,
}
IN_PLACE: dict[str, Any] = {
    "disable_radix_cache": True,  # what running requests keep is of old weights, and must serve no other request
    "disable_overlap_schedule": True,  # a token in flight at the switch would be told as one of the new weights
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What is ours to say about the server; the rest are SGLang's own options."""

    device: str = "auto"
    threads: int = 1
    hooks: bool = True
    python: str | None = None
    in_place: bool = False
    memory_saver: bool = False
    """The device is shared: it must be able to give its memory back. On a CPU SGLang cannot."""


def on_cpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not any(Path(path).exists() for path in GPU_DEVICES))


def interpreter(named: str | None) -> str:
    return named or (str(ENVIRONMENT) if ENVIRONMENT.exists() else sys.executable)


def module(settings: Settings) -> str:
    """On a CPU the stand-ins are needed with and without hooks."""
    return HOOKED if settings.hooks or on_cpu(settings.device) else NATIVE


def server_options(settings: Settings, native: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `sglang.launch_server`; underscores or dashes, `native` wins."""
    options = dict(ALWAYS)
    if on_cpu(settings.device):
        options |= ON_CPU
    if settings.in_place:
        options |= IN_PLACE
    if settings.memory_saver and not on_cpu(settings.device):
        options["enable_memory_saver"] = True
    return options | {name.lstrip("-").replace("-", "_"): value for name, value in native.items()}


def environment(settings: Settings) -> dict[str, str]:
    """Variables of the server's process, beside those of this one."""
    path = os.pathsep.join(filter(None, [str(SOURCE_ROOT), os.environ.get("PYTHONPATH", "")]))
    variables = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # the folder has all there is
    if not settings.hooks:
        variables[HOOKS] = "0"
    if on_cpu(settings.device):
        threads = str(settings.threads)
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", STANDINS: "1", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }  # more than one spins where cores are shared
    return variables


def free_port(host: str) -> int:
    """SGLang cannot choose one itself and tell it. Whoever takes it in between makes the start fail, loudly."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
