"""Megatron's process groups for a layout. One layout at a time in a process; asking for the same again changes nothing."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state

from services.trainer.layout import Layout

_current: list[Layout] = []


def init_distributed(
    device: str, timeout_s: float, store: dist.Store | None = None, rank: int = 0, ranks: int = 1
) -> None:
    """torch.distributed's default group, if there is none yet.

    Of the ranks that meet in `store`; without one, of those that torchrun's environment names; otherwise of this process alone,
    which opens no port. Every operation between ranks fails after `timeout_s`.
    """
    if dist.is_initialized():
        return
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    timeout = timedelta(seconds=timeout_s)
    if store is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=store or dist.HashStore(), rank=rank, world_size=ranks, timeout=timeout)


def init_groups(layout: Layout, timeout_s: float) -> None:
    """Megatron's groups for `layout`, on all ranks alike."""
    if _current == [layout]:
        return
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    _current.clear()
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        layout.virtual,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]  # becomes a timedelta
    )
    _current.append(layout)
