"""A policy as the run file asks for it: on this rank alone, or with the ranks that work together."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import numpy as np
import torch

from services.trainer.channel import Gathering
from services.trainer.megatron.policy import Policy, Role
from services.trainer.ranks import RankedPolicy, Ranks
from services.trainer.stage import StageAddress
from shared.config import ConfigError, RunConfig


def device_of(config: RunConfig) -> str:
    """cuda or cpu, as `trainer.device` says."""
    found = torch.cuda.is_available()
    if config.trainer.device == "cuda" and not found:
        raise ConfigError("trainer.device: cuda, but torch sees no GPU here; set it to auto or cpu")
    if config.dcs.cuda_ipc and not found:
        raise ConfigError("dcs.cuda_ipc: true, but torch sees no GPU here; set it to false")
    if config.trainer.device == "auto":
        return "cuda" if found else "cpu"
    return config.trainer.device


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def build(config: RunConfig, gathering: Gathering | None = None) -> RankedPolicy:
    """Leader: the policy, on all ranks of `gathering`."""
    device, folder = device_of(config), config.path(config.model.path)
    if gathering is None:
        return Ranks(partial(build_rank, config, device)).add("policy", folder)
    form = {"config": config.dump(), "device": device}
    channel = gathering.form(form, device, config.trainer.rank_timeout_s)
    try:
        return Ranks(partial(build_rank, config, device), channel).add("policy", folder)
    except BaseException:
        channel.abandon()
        raise


def open_stages(config: RunConfig, policy: RankedPolicy) -> list[StageAddress]:
    """Leader: the further senders of the weights, one a pipeline stage beside its own. On a device that is shared with engines
    these take all weights from the leader's memory."""
    if policy.layout.pipeline == 1 or config.colocated:
        return []
    return policy.open_stages(config.dcs.bucket_mb, config.dcs.timeout_s)


def build_rank(config: RunConfig, device: str, folder: Path, role: Role) -> Policy:
    """This rank's part of a model."""
    torch.use_deterministic_algorithms(config.deterministic, warn_only=True)
    seed_everything(config.seed)
    if device == "cuda":
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # lets tensor parallelism overlap as Megatron intends
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    options = config.trainer
    if role == "critic" and config.critic is not None:
        options = options.model_copy(update={"optimizer": config.critic.optimizer})
    return Policy.create(folder, options, device, dtype=config.model.dtype, seed=config.seed, role=role)
