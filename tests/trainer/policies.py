"""What tests do with a policy: train it on known batches, and look at its weights, gradients and state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.trainer.algorithms import policy_loss
from services.trainer.algorithms.reductions import merge
from services.trainer.batches import pack
from services.trainer.tensorfile import Spec
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
    """Everything that the next update depends on, copied."""
    found = {name: tensor.clone() for name, tensor in policy.state_tensors()}
    assert [Spec.of(name, tensor) for name, tensor in found.items()] == policy.state_specs()
    return found


def restore(policy: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "state.safetensors")
    policy.restore(folder / "state.safetensors")


def weights(policy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.hf_tensors()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def gradients(policy: Any) -> dict[str, torch.Tensor]:
    """The summed gradients under their Hugging Face names."""
    return {name: gradient.clone() for name, gradient in policy.gradients()}
