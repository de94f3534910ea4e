"""What tests do with a policy: train it on known batches, and look at its weights, gradients and state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from services.trainer import saving
from services.trainer.algorithms import policy_loss
from services.trainer.algorithms.reductions import merge
from services.trainer.batches import pack
from services.trainer.checkpoint import CheckpointStore
from services.trainer.ranks import RankedPolicy
from services.trainer.state_files import file_of, write
from shared.algorithms import GrpoConfig
from tests.trainer.conftest import samples

grpo = policy_loss(GrpoConfig())


def train(policy: Any, steps: range, budget: int = 1000, loss: Any = grpo) -> list[float]:
    """Some updates on batches that depend on the step only."""
    norms = []
    for step in steps:
        sums = merge(policy.forward_backward(batch, loss) for batch in pack(samples(12, seed=step), budget))
        norms.append(policy.update(sums["denominator"], 1e-2)["grad_norm"])
    return norms


def state(policy: Any) -> dict[str, torch.Tensor]:
    """Everything that the next update depends on."""
    return dict(policy.state_tensors())


def restore(policy: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    write(folder / file_of(0), list(tensors.items()))
    policy.restore(folder)


def save(store: CheckpointStore, step: int, policy: Any, meta: Any) -> None:
    """A checkpoint of a policy of one rank."""
    saving.save(store, RankedPolicy.alone(policy).ranks, {"policy": ""}, step, meta)


def weights(policy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.hf_tensors()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def gradients(policy: Any) -> dict[str, torch.Tensor]:
    """The summed gradients under their Hugging Face names."""
    return {name: gradient.clone() for name, gradient in policy.gradients()}
