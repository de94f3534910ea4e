"""AdamW from Megatron - plain, with float32 copies, or cut over data-parallel ranks - and its state tensor by tensor.

Megatron's own formats of optimiser states depend on its buffers, and one of them restores a single step counter into all
parameters at once. Here the state is seen per parameter, in the parameter's shape, so that checkpoints depend on no layout
(checkpoint.py). tests/trainer/test_policy.py, tests/trainer/layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from services.trainer.megatron.compat import cuda_type_names
from shared.sections import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER, GRADIENT = "master", "gradient"


@dataclass(frozen=True, slots=True)
class Held:
    """This rank's part of a parameter in the optimiser."""

    main: torch.Tensor
    """What AdamW updates: the parameter, its float32 copy, or a flat part of either."""
    state: dict[str, Any]
    start: int | None
    """Where the flat part begins; None: it is the whole parameter."""


class Optimizer:
    """One AdamW over this rank's chunks of the model."""

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        options: OptimizerConfig,
        native: dict[str, Any],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.masters = dtype is not torch.float32
        with cuda_type_names(device):
            self.megatron = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=options.lr,
                    weight_decay=options.weight_decay,
                    adam_beta1=options.betas[0],
                    adam_beta2=options.betas[1],
                    adam_eps=options.eps,
                    bf16=self.masters,
                    params_dtype=dtype,
                    **native,
                ),
                chunks,
            )
        for group in self.megatron.param_groups:
            # Megatron leaves this to its scheduler: norms and biases are not decayed.
            group["weight_decay"] = options.weight_decay * group["wd_mult"]
            if device.type == "cpu" and "fused" in group:
                group["fused"] = True  # one kernel a tensor instead of a dozen
        self._owners: dict[torch.Tensor, Any] = {}
        for part in self.megatron.chained_optimizers:
            for owned in _model_parameters(part):
                self._owners[owned] = part

    def gradients(self) -> Iterator[torch.Tensor]:
        """The gradients that the next step will use, once they are reduced and prepared."""
        for group in self.megatron.param_groups:
            for parameter in group["params"]:
                for name in ("grad", "decoupled_grad"):
                    gradient = getattr(parameter, name, None)
                    if gradient is not None:
                        yield gradient

    def held(self, parameter: torch.nn.Parameter) -> Held | None:
        """What this rank has of the parameter; None if another data-parallel rank has all of it."""
        part = self._owners.get(parameter)
        if isinstance(part, DistributedOptimizer):
            if parameter not in part.model_param_group_index_map:
                return None
            group, order = part.model_param_group_index_map[parameter]
            main = part.optimizer.param_groups[group]["params"][order]
            return Held(main, part.optimizer.state[main], part._get_model_param_range_map(parameter)["param"].start)
        assert part is not None, "a parameter without an optimiser"
        master = getattr(parameter, "main_param", None)
        main = parameter if master is None else master
        return Held(main, part.optimizer.state[main], None)

    @property
    def steps(self) -> int:
        """Steps that the moments have seen; 0: there are none."""
        for part in self.megatron.chained_optimizers:
            for group in part.param_groups:
                if "step" in group:  # fused implementations count once a group
                    return int(group["step"])
                for parameter in group["params"]:
                    if "step" in part.optimizer.state[parameter]:
                        return int(part.optimizer.state[parameter]["step"])
        return 0

    def restore_steps(self, steps: int) -> None:
        """Set the counters; with 0 the moments are forgotten."""
        for part in self.megatron.chained_optimizers:
            for group in part.param_groups:
                if "step" in group:
                    group["step"] = steps
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    if not steps:
                        state.clear()
                    elif "step" not in group:
                        # Each its own: a shared counter would be raised once a parameter.
                        where = parameter.device if group.get("fused") or group.get("capturable") else "cpu"
                        state["step"] = torch.tensor(float(steps), device=where)

    def take(self, parameter: torch.nn.Parameter, what: str) -> torch.Tensor:
        """A moment, the float32 copy or the prepared gradient, in the parameter's shape.

        Data-parallel ranks call it together where they share it.
        """
        held = self.held(parameter)
        if held is not None and held.start is None:
            return _value(held, what)
        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if held is not None:
            value = _value(held, what)
            assert held.start is not None
            flat[held.start : held.start + value.numel()] = value
        dist.all_reduce(flat, group=_replicas(parameter))
        return flat.view(parameter.shape)

    def put(self, parameter: torch.nn.Parameter, what: str, value: torch.Tensor) -> None:
        """Restore what `take` gave, from the whole value on each rank."""
        held = self.held(parameter)
        if held is None:
            return
        if held.start is not None:
            value = value.flatten()[held.start : held.start + held.main.numel()]
        value = value.view(held.main.shape)
        if what == MASTER:
            held.main.copy_(value)
        elif what in held.state:
            held.state[what].copy_(value)
        else:
            held.state[what] = value.to(device=held.main.device, dtype=torch.float32, copy=True)


def _value(held: Held, what: str) -> torch.Tensor:
    if what == MASTER:
        return held.main.detach()
    if what == GRADIENT:
        assert held.main.grad is not None
        return held.main.grad
    return held.state[what]


def _model_parameters(part: Any) -> Iterator[torch.Tensor]:
    """The model's parameters that a part of Megatron's optimiser updates."""
    if isinstance(part, DistributedOptimizer):
        for buffer in part.buffers:
            yield from buffer.params
    elif hasattr(part, "float16_groups"):
        for groups in (part.float16_groups, part.fp32_from_fp32_groups):
            for group in groups:
                yield from group
    else:
        for group in part.param_groups:
            yield from group["params"]


def _replicas(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """The ranks over which the distributed optimiser cuts this parameter's state."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()
