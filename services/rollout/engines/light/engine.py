"""Putting the engine together from its options: model, KV cache, scheduler, weights. No HTTP in here.

Guarantees that the default KV cache fits the memory there is; `--max-total-tokens` overrides it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.rollout.engines.light.kv_cache import KVCache
from services.rollout.engines.light.model import ModelConfig, Qwen3, load
from services.rollout.engines.light.options import EngineOptions
from services.rollout.engines.light.protocol import Limits
from services.rollout.engines.light.scheduler import Scheduler
from services.rollout.engines.receiving import DTYPES

DEFAULT_TOKENS = 1 << 17
CPU_SHARE, GPU_SHARE = 0.25, 0.5
"""Shares of all memory of the host, or of what is free on the GPU once the model is there, that the KV cache takes by default."""


@dataclass(slots=True)
class Engine:
    options: EngineOptions
    model: Qwen3
    scheduler: Scheduler
    limits: Limits

    @classmethod
    def build(cls, options: EngineOptions, on_death: Callable[[], None]) -> Engine:
        """Load the model and take the memory. Raises ModelError."""
        torch.set_num_threads(options.threads)
        device = pick_device(options.device)
        model = load(options.model, device, DTYPES.get(options.dtype))
        capacity = options.max_total_tokens or default_capacity(model.config, device, model.dtype)
        cache = KVCache(model.config, capacity, device, model.dtype)
        context = min(options.context_length or model.config.max_positions, model.config.max_positions)
        scheduler = Scheduler(
            model, cache, options.max_running_requests, options.max_prefill_tokens, options.weight_version, on_death
        )
        limits = Limits(model.config.vocab, context, cache.capacity, model.config.eos_ids)
        return cls(options, model, scheduler, limits)


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def default_capacity(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> int:
    token_bytes = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize
    if device.type == "cuda":
        budget = torch.cuda.mem_get_info(device)[0] * GPU_SHARE
    else:
        budget = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * CPU_SHARE
    return max(1, min(DEFAULT_TOKENS, int(budget / token_bytes)))
