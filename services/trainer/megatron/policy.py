"""The policy: a Megatron model, its gradients and its optimiser, as the trainer service uses them.

An update is: `forward_backward` with micro-batches as they arrive, adding up un-normalised gradients, then one `update` that
divides by the sum of all denominators, clips, and steps. Guarantees:

- The split into micro-batches, their packing, and the layout of ranks change the result by rounding only.
- Same seed, weights, layout and inputs give the same weights, bit for bit, on a CPU; a restored state goes on bit for bit.
- A loss or gradient that is not finite is a `NonFiniteError` before any weight has changed; `discard` then clears the sums.
- A batch without signal (all gradients zero) changes nothing, the optimiser's moments included, and says so.

With several ranks every rank has a `Policy`, and all call the same methods with the micro-batches of their replica at the same
time; services/trainer/ranks.py sees to that. The last pipeline stage has the metrics, the leader the tensors. Not thread-safe:
one thread at a time. Enforced by tests/trainer/test_policy.py and tests/trainer/layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module

from services.trainer.algorithms.reductions import Loss, Tokens, merge
from services.trainer.batches import PackedBatch
from services.trainer.families import Head
from services.trainer.hf_folder import save_hf
from services.trainer.layout import Layout, layout_of
from services.trainer.megatron.groups import init_distributed, init_groups
from services.trainer.megatron.model import TRANSFORMER_ENGINE, build_chunks
from services.trainer.megatron.offload import Offload, tensors_of
from services.trainer.megatron.optimizer import GRADIENT, Optimizer
from services.trainer.megatron.options import native_options, transformer_config
from services.trainer.megatron.sharding import Shards
from services.trainer.megatron.state import State, StateMismatch
from services.trainer.megatron.step import NonFiniteError, Scores, Step, nonfinite_gradient, tokens_of
from services.trainer.megatron.weights import load_hf
from services.trainer.model_folder import Architecture, read_architecture
from services.trainer.spread import Spread
from services.trainer.tensorfile import Spec
from shared.sections import OptimizerConfig, TrainerConfig

__all__ = ["NonFiniteError", "Policy", "Role", "Scores", "StateMismatch"]

Batches = PackedBatch | Sequence[PackedBatch] | Spread
"""Micro-batches of this replica, or of all replicas."""

Role = Literal["actor", "reference", "critic"]
"""actor: trained, gives log-probabilities. reference: the same without gradients or optimiser. critic: trained, gives values."""


class Policy:
    """Build with `Policy.create`."""

    def __init__(
        self,
        folder: Path,
        architecture: Architecture,
        layout: Layout,
        config: TrainerConfig,
        dtype: torch.dtype,
        device: torch.device,
        role: Role,
    ):
        self.folder, self.architecture, self.layout = folder, architecture, layout
        self.device, self.dtype, self.role = device, dtype, role
        head: Head = "value" if role == "critic" else "vocabulary"
        self._native = native_options(config.megatron)
        transformer = transformer_config(architecture, dtype, self._native.transformer, layout)
        self.chunks = [
            chunk.to(device=device, dtype=dtype) for chunk in build_chunks(architecture, transformer, layout, head)
        ]
        self.shards = Shards(self.chunks, architecture, layout, head)
        load_hf(self.shards, folder)
        wrapped = [Float16Module(transformer, c) if dtype is torch.bfloat16 else c for c in self.chunks]
        self._models: list[Any] = wrapped
        self._optimizer: Optimizer | None = None
        self._clip, self._reduced = 0.0, False
        self._reference: dict[str, torch.Tensor] | None = None
        self._offload = Offload()
        if role != "reference":
            options = DistributedDataParallelConfig(**{"grad_reduce_in_fp32": True, **self._native.ddp})
            self._models = [
                DistributedDataParallel(transformer, options, chunk, disable_bucketing=number > 0)
                for number, chunk in enumerate(wrapped)
            ]
            self.reset_optimizer(config.optimizer)
        self._set_training(role != "reference")
        self._run = get_forward_backward_func()

    @classmethod
    def create(
        cls,
        model_dir: str | Path,
        config: TrainerConfig,
        device: str = "cpu",
        *,
        dtype: str = "float32",
        seed: int = 0,
        role: Role = "actor",
    ) -> Policy:
        """A policy with the weights of a model folder. `device` is cpu or cuda; `dtype` float32 or bfloat16."""
        folder = Path(model_dir)
        architecture = read_architecture(folder)
        native_options(config.megatron)  # a misspelt option is named before any group is formed
        if device == "cpu":
            torch.set_num_threads(config.threads)
        init_distributed(device, config.rank_timeout_s)
        layout = layout_of(config.megatron, dist.get_world_size(), architecture)
        init_groups(layout, config.rank_timeout_s)
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        return cls(folder, architecture, layout, config, getattr(torch, dtype), where, role)

    # ------------------------------------------------------------------------------------------------------ training

    @property
    def replica(self) -> int:
        """Which of the data-parallel replicas this rank belongs to."""
        return parallel_state.get_data_parallel_rank()

    @property
    def reports(self) -> bool:
        """This rank is the one of its replica that has metrics and scores."""
        return (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )

    def forward_backward(self, batches: Batches, loss: Loss, temperature: float = 1.0) -> dict[str, float]:
        """Add the gradients of these micro-batches to the sums; their summed metrics, on the last pipeline stage."""
        step = self._step(batches, temperature, loss)
        self._go(step, forward_only=False)
        if step.problem:
            raise NonFiniteError(step.problem)
        return merge(step.metrics)

    @torch.no_grad()
    def score(
        self, batches: Batches, temperature: float = 1.0, top: int = 0, by_reference: bool = False
    ) -> list[Scores]:
        """Scores of each micro-batch's trained tokens, without gradients, on the last pipeline stage. `by_reference`: of the
        reference that is held beside the weights."""
        step = self._step(batches, temperature, None, top)
        self._set_training(False)
        try:
            with self._with_reference() if by_reference else nullcontext():
                self._go(step, forward_only=True)
        finally:
            self._set_training(self.role != "reference")
        return step.scores

    def logprobs(self, batch: PackedBatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probability, entropy) of the batch's N trained tokens, without gradients. For one rank."""
        (scores,) = self.score(batch, temperature)
        return scores.logprobs_N, scores.entropy_N

    def observe(self, batches: Batches, temperature: float = 1.0) -> list[Tokens]:
        """What a loss would see of these micro-batches now, without gradients: for `algorithms.first_pass`. For one rank."""
        listed = self._own(batches)
        return [
            tokens_of(batch, scores.logprobs_N[:, None], scores.entropy_N)
            for batch, scores in zip(listed, self.score(listed, temperature), strict=True)
        ]

    def update(self, denominator: float, lr: float) -> dict[str, float]:
        """Divide the summed gradients by `denominator`, clip, step, and clear the sums.

        `grad_norm` is the norm before clipping; `updated` is 0 when there was no signal and nothing changed.
        """
        optimizer = self._trained()
        self._reduce()
        norm_of_sum = float(optimizer.megatron.get_grad_norm())
        if not math.isfinite(norm_of_sum):
            raise nonfinite_gradient(norm_of_sum)
        if norm_of_sum == 0.0 or denominator <= 0.0:
            self.discard()
            return {"grad_norm": 0.0, "updated": 0.0, "lr": lr}
        norm = norm_of_sum / denominator
        clip = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0
        for gradient in optimizer.gradients():
            gradient.mul_(clip / denominator)
        for group in optimizer.megatron.param_groups:
            group["lr"] = lr * group["lr_mult"]
        optimizer.megatron.step_with_ready_grads()
        self.discard()
        return {"grad_norm": norm, "updated": 1.0, "lr": lr}

    def discard(self) -> None:
        """Clear the summed gradients."""
        for model in self._models:
            model.zero_grad_buffer()
        self._trained().megatron.zero_grad()
        self._reduced = False

    def reset_optimizer(self, options: OptimizerConfig) -> None:
        """Start a new AdamW with these settings and empty moments. The rate is given with each update."""
        self._optimizer = Optimizer(self._models, options, self._native.optimizer, self.dtype, self.device)
        self._clip = options.clip_grad
        self.discard()

    def _reduce(self) -> None:
        """Sum the gradients over ranks and hand them to the optimiser, once an update."""
        if not self._reduced:
            finalize_model_grads(self._models)
            self._trained().megatron.prepare_grads()
            self._reduced = True

    def _trained(self) -> Optimizer:
        if self._optimizer is None:
            raise RuntimeError("a reference has no optimiser: it is not trained")
        return self._optimizer

    def _set_training(self, training: bool) -> None:
        for model in self._models:
            model.train(training)

    def _own(self, batches: Batches) -> list[PackedBatch]:
        if isinstance(batches, Spread):
            return list(batches.replicas[self.replica])
        return [batches] if isinstance(batches, PackedBatch) else list(batches)

    def _step(self, batches: Batches, temperature: float, loss: Loss | None, top: int = 0) -> Step:
        return Step(self._own(batches), temperature, loss, top, self.layout, self.device, bounds=TRANSFORMER_ENGINE)

    def _go(self, step: Step, *, forward_only: bool) -> None:
        """Megatron's schedule for this layout: plain, 1F1B, or interleaved."""
        iterators = [iter(step.batches) for _ in self._models]
        self._run(
            forward_step_func=step.forward,
            data_iterator=iterators if self.layout.virtual else iterators[0],
            model=self._models,
            num_microbatches=len(step.batches),
            seq_length=step.length or step.batches[0].tokens,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    # ------------------------------------------------------------------------------------------------------- weights

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor) on the leader; on all ranks at once. May share memory with the model: copy before the next
        update."""
        return self.shards.full(lambda parameter: parameter.detach(), self.dtype)

    def stage_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As `hf_tensors`, but each pipeline stage's on the head of that stage."""
        return self.shards.full(lambda parameter: parameter.detach(), self.dtype, by_stage=True)

    def hf_specs(self) -> list[Spec]:
        """Names, types and shapes of `hf_tensors`, known beforehand."""
        return [Spec(name, self.dtype, shape) for name, shape in self.shards.names()]

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, summed gradient) on the leader, before `update`; on all ranks at once."""
        self._reduce()
        optimizer = self._trained()
        return self.shards.full(lambda parameter: optimizer.take(parameter, GRADIENT), torch.float32)

    def save_hf(self, target: str | Path) -> dict[str, str]:
        """Write the weights as a model folder with the tokenizer of theirs; sha256 by file name. For one rank."""
        return save_hf(self.hf_specs(), self.hf_tensors(), self.folder, target)

    def load_hf(self, folder: str | Path) -> None:
        """Replace the weights; the optimiser starts anew from them where it keeps float32 copies."""
        load_hf(self.shards, folder)
        if self._optimizer is not None:
            self._optimizer.megatron.reload_model_params()

    def copy_weights(self, other: Policy) -> None:
        """Take over the weights of a policy of the same architecture and layout, all but the head where heads differ."""
        for name, parameter in other.shards.held.items():
            if name in self.shards.held:
                self.shards.held[name].data.copy_(parameter.data)
        if self._optimizer is not None:
            self._optimizer.megatron.reload_model_params()

    def hold_reference(self, folder: str | Path | None = None) -> None:
        """Keep a second set of weights, for `score(by_reference=True)`: those of this moment, or of a folder. They cost the
        weights' memory, are part of the state, and are exchanged with the weights for the time of scoring."""
        if self._reference is None:
            self._reference = {name: p.detach().clone() for name, p in self.shards.held.items()}
        if folder is not None:
            with self._with_reference():
                load_hf(self.shards, folder)
            return
        for name, parameter in self.shards.held.items():
            self._reference[name].copy_(parameter.data)

    @contextmanager
    def _with_reference(self) -> Iterator[None]:
        """While this lasts, the model computes with the reference's weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        if self._reference is None:
            raise RuntimeError("no reference is held: call hold_reference first")
        for name, parameter in self.shards.held.items():
            parameter.data, self._reference[name] = self._reference[name], parameter.data

    # --------------------------------------------------------------------------------------------- sharing the device

    def sleep(self) -> None:
        """Leave the device to others: all that lies there goes into host memory until `wake`. On a CPU it is there already."""
        if self.device.type != "cpu":
            self._offload.off(self.resident())

    def wake(self) -> None:
        """Back to where it was."""
        self._offload.back()

    def resident(self) -> Iterator[torch.Tensor]:
        """What lies on the device between two updates."""
        optimizers = [] if self._optimizer is None else self._optimizer.megatron.chained_optimizers
        yield from tensors_of(self._models, (part.optimizer for part in optimizers))
        yield from (self._reference or {}).values()

    def _state(self, prefix: str) -> State:
        return State(self.shards, self._trained(), self.device, self._reference, prefix)

    def state_tensors(self, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's share of everything that the next update depends on, in no layout's terms, copied into host memory; on all
        ranks at once."""
        return self._state(prefix).tensors()

    def restore(self, folder: str | Path, prefix: str = "") -> None:
        """Restore the state in a folder, saved by ranks of this or another layout; on all ranks. StateMismatch if it is of
        another model; then nothing has changed."""
        self._state(prefix).restore(Path(folder))
        self.discard()
