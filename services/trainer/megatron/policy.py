"""The policy: a Megatron model, its gradients and its optimiser, as the trainer service uses them.

An update is: `forward_backward` for each micro-batch as it arrives, adding up un-normalised gradients, then one `update`
that divides by the sum of all denominators, clips, and steps. Guarantees:

- The split into micro-batches and their packing change the result by rounding only.
- Same seed, weights and inputs give the same weights, bit for bit, on a CPU; a restored state goes on bit for bit.
- A loss or gradient that is not finite is a `NonFiniteError` before any weight has changed; `discard` then clears the sums.
- A batch without signal (all gradients zero) changes nothing, the optimiser's moments included, and says so.

Not thread-safe: one thread at a time. Enforced by tests/trainer/test_policy.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from services.trainer.algorithms.reductions import Loss, Tokens
from services.trainer.batches import PackedBatch
from services.trainer.megatron.compat import cuda_type_names
from services.trainer.megatron.model import PackedLayout, PolicyModel, build_model, native_options, transformer_config
from services.trainer.megatron.weights import iter_hf, load_hf, save_hf
from services.trainer.model_folder import Architecture, read_architecture
from shared.sections import OptimizerConfig, TrainerConfig

TOP_IDS = "teacher_top_ids"
"""The column whose ids the policy scores beside the sampled ones."""


class NonFiniteError(ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


class StateMismatch(ValueError):
    """A saved state does not belong to this model."""


class Policy:
    """Build with `Policy.create`."""

    def __init__(
        self, folder: Path, architecture: Architecture, config: TrainerConfig, dtype: torch.dtype, device: torch.device
    ):
        self.folder = folder
        self.architecture = architecture
        self.device = device
        self.dtype = dtype
        self._native = native_options(config.megatron)
        transformer = transformer_config(architecture, dtype, self._native.transformer)
        self.model: PolicyModel = self.build(architecture, transformer).to(device=device, dtype=dtype)
        self.load_weights(folder)
        chunk = Float16Module(transformer, self.model) if dtype is torch.bfloat16 else self.model
        ddp_options = {"grad_reduce_in_fp32": True, **self._native.ddp}
        self._ddp = DistributedDataParallel(transformer, DistributedDataParallelConfig(**ddp_options), chunk)
        self._ddp.train()
        self._run = get_forward_backward_func()
        self._optimizer: MegatronOptimizer
        self._clip = 0.0
        self.reset_optimizer(config.optimizer)

    @classmethod
    def create(
        cls,
        model_dir: str | Path,
        config: TrainerConfig,
        device: str = "cpu",
        *,
        dtype: str = "float32",
        seed: int = 0,
    ) -> Policy:
        """A policy with the weights of a model folder. `device` is cpu or cuda; `dtype` float32 or bfloat16."""
        folder = Path(model_dir)
        architecture = read_architecture(folder)
        if device == "cpu":
            torch.set_num_threads(config.threads)
        ensure_process_groups(device)
        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        return cls(folder, architecture, config, getattr(torch, dtype), torch.device(device))

    @staticmethod
    def build(architecture: Architecture, config: TransformerConfig) -> PolicyModel:
        """The module, its weights not loaded yet. A critic has another one."""
        return build_model(architecture, config)

    def load_weights(self, folder: Path) -> None:
        """Fill the module from a model folder."""
        load_hf(self.model, folder, self.architecture)

    # ------------------------------------------------------------------------------------------------------ training

    def forward_backward(self, batch: PackedBatch, loss: Loss, temperature: float = 1.0) -> dict[str, float]:
        """Add this micro-batch's gradients to the sums; its summed metrics."""
        reported: list[dict[str, torch.Tensor]] = []

        def loss_of(
            output: tuple[torch.Tensor, torch.Tensor],
        ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            total, metrics = loss(self._tokens(batch, *output))
            if not math.isfinite(float(total.detach())):
                raise NonFiniteError(_nonfinite_loss(batch, output[0]))
            reported.append(metrics)
            return total, torch.zeros((), dtype=torch.int), metrics

        def step(batches: Iterator[PackedBatch], chunk: torch.nn.Module) -> tuple[Any, Any]:
            return chunk(**self._inputs(next(batches), temperature)), loss_of

        self._run(
            forward_step_func=step,
            data_iterator=iter((batch,)),
            model=[self._ddp],
            num_microbatches=1,
            seq_length=batch.tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        names = list(reported[0])
        values = torch.stack([reported[0][name].detach().double() for name in names]).tolist()
        return {
            **dict(zip(names, values, strict=True)),
            "sequences": float(len(batch.lengths_S)),
            "nonfinite_logprobs": float(batch.nonfinite),
        }

    def update(self, denominator: float, lr: float) -> dict[str, float]:
        """Divide the summed gradients by `denominator`, clip, step, and clear the sums.

        `grad_norm` is the norm before clipping; `updated` is 0 when there was no signal and nothing changed.
        """
        finalize_model_grads([self._ddp])
        self._optimizer.prepare_grads()
        norm_of_sum = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm_of_sum):
            raise NonFiniteError(
                f"the gradient's norm is {norm_of_sum}: no weight was changed; lower the learning rate or check the advantages"
            )
        if norm_of_sum == 0.0 or denominator <= 0.0:
            self.discard()
            return {"grad_norm": 0.0, "updated": 0.0, "lr": lr}
        norm = norm_of_sum / denominator
        clip = min(1.0, self._clip / (norm + 1e-6)) if self._clip > 0 else 1.0
        self._ddp.scale_gradients(clip / denominator)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group["lr_mult"]
        self._optimizer.step_with_ready_grads()
        self.discard()
        return {"grad_norm": norm, "updated": 1.0, "lr": lr}

    def discard(self) -> None:
        """Clear the summed gradients."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probability, entropy) of the batch's N trained tokens, without gradients."""
        self.model.eval()
        try:
            logprobs_N, entropy_N, *_ = self._ddp.module(**self._inputs(batch, temperature))
            return logprobs_N, entropy_N
        finally:
            self.model.train()

    def observe(self, batch: PackedBatch, temperature: float = 1.0) -> Tokens:
        """What a loss would see of this micro-batch now, without gradients: for `algorithms.first_pass`."""
        return self._tokens(batch, *self.logprobs(batch, temperature))

    def reset_optimizer(self, options: OptimizerConfig) -> None:
        """Start a new AdamW with these settings and empty moments. The rate is given with each update."""
        with cuda_type_names(self.device):
            self._optimizer = get_megatron_optimizer(
                MegatronOptimizerConfig(
                    optimizer="adam",
                    lr=options.lr,
                    weight_decay=options.weight_decay,
                    adam_beta1=options.betas[0],
                    adam_beta2=options.betas[1],
                    adam_eps=options.eps,
                    bf16=self.dtype is torch.bfloat16,
                    params_dtype=self.dtype,
                    **self._native.optimizer,
                ),
                [self._ddp],
            )
        for group in self._optimizer.param_groups:
            # Megatron leaves this to its scheduler: norms and biases are not decayed.
            group["weight_decay"] = options.weight_decay * group["wd_mult"]
            if self.device.type == "cpu" and "fused" in group:
                group["fused"] = True  # one kernel a tensor instead of a dozen
        self._clip = options.clip_grad
        self.discard()

    # ------------------------------------------------------------------------------------------------------- weights

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor). Shares memory with the model: copy before the next update."""
        return iter_hf(self.model, self.architecture)

    def save_hf(self, target: str | Path) -> dict[str, str]:
        """Write the weights as a model folder with the tokenizer of the one that they came from; sha256 by file name."""
        return save_hf(list(self.hf_tensors()), self.folder, target)

    def load_hf(self, folder: str | Path) -> None:
        """Replace the weights; the optimiser starts anew from them where it keeps float32 copies."""
        load_hf(self.model, folder, self.architecture)
        self._optimizer.reload_model_params()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything that the next update depends on, flat. Shares memory with the policy: write or copy before it."""
        state = {f"model.{name}": tensor.detach() for name, tensor in self.model.named_parameters()}
        for name, master, slots in self._slots():
            if master is not None:
                state[f"optimizer.{name}.master"] = master.detach()
            for slot, value in slots.items():
                state[f"optimizer.{name}.{slot}"] = value if torch.is_tensor(value) else torch.tensor(float(value))
        state["rng.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state["rng.cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore what `state_dict` gave. StateMismatch if it is of another model; then nothing has changed."""
        parameters = dict(self.model.named_parameters())
        saved = {key.removeprefix("model."): value for key, value in state.items() if key.startswith("model.")}
        if saved.keys() != parameters.keys():
            odd = sorted(saved.keys() ^ parameters.keys())[0]
            raise StateMismatch(f"the saved state belongs to another model: {odd!r} is only in one of them")
        for name, parameter in parameters.items():
            if saved[name].shape != parameter.shape:
                raise StateMismatch(
                    f"{name}: saved with shape {tuple(saved[name].shape)}, the model has {tuple(parameter.shape)}"
                )
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])
        for name, master, slots in self._slots():
            prefix = f"optimizer.{name}."
            slots.clear()
            for key, value in state.items():
                if key.startswith(prefix) and key != f"{prefix}master":
                    slots[key.removeprefix(prefix)] = (
                        value.clone() if value.dim() == 0 else value.to(self.device, copy=True)
                    )
            if master is not None:
                master.copy_(state[f"{prefix}master"])
        torch.set_rng_state(state["rng.cpu"].cpu())
        if self.device.type == "cuda" and "rng.cuda" in state:
            torch.cuda.set_rng_state(state["rng.cuda"].cpu(), self.device)
        self.discard()

    def _slots(self) -> Iterator[tuple[str, torch.Tensor | None, dict[str, Any]]]:
        """(parameter's name, its float32 copy if there is one, Adam's moments of it)."""
        moments: dict[torch.Tensor, dict[str, Any]] = {}
        for chained in self._optimizer.chained_optimizers:
            for group in chained.optimizer.param_groups:
                for parameter in group["params"]:
                    moments[parameter] = chained.optimizer.state[parameter]
        for name, parameter in self.model.named_parameters():
            master = getattr(parameter, "main_param", None)
            yield name, master, moments[parameter if master is None else master]

    # -------------------------------------------------------------------------------------------------------- inputs

    def _inputs(self, batch: PackedBatch, temperature: float) -> dict[str, Any]:
        return {
            "ids_T": self._tensor(batch.ids_T),
            "positions_T": self._tensor(batch.positions_T),
            "layout": PackedLayout.of(batch.lengths_S.tolist(), self.device),
            "rows_N": self._tensor(batch.rows_N),
            "targets_N": self._tensor(batch.targets_N),
            "temperature": temperature,
            **({"others_NK": self._tensor(batch.extras[TOP_IDS]).long()} if TOP_IDS in batch.extras else {}),
        }

    def _tokens(
        self, batch: PackedBatch, logprobs_N: torch.Tensor, entropy_N: torch.Tensor, *others_NK: torch.Tensor
    ) -> Tokens:
        return Tokens(
            logprobs_N=logprobs_N,
            rollout_logprobs_N=self._tensor(batch.rollout_logprobs_N),
            advantages_N=self._tensor(batch.advantages_N),
            mask_N=self._tensor(batch.mask_N),
            sequence_N=self._tensor(batch.sequence_N),
            sequences=len(batch.lengths_S),
            entropy_N=entropy_N,
            extras={
                **{name: self._tensor(column) for name, column in batch.extras.items()},
                **dict(zip(("student_top_logprobs",), others_NK, strict=False)),
            },
        )

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def ensure_process_groups(device: str) -> None:
    """Megatron's process groups for one rank; those of an earlier call stay. Opens no port."""
    if not dist.is_initialized():
        backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != 1:
        raise RuntimeError(
            f"this trainer runs one rank, but torch.distributed has {dist.get_world_size()}; start it once"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def _nonfinite_loss(batch: PackedBatch, logprobs_N: torch.Tensor) -> str:
    finite = int(torch.isfinite(logprobs_N).sum())
    advantages = batch.advantages_N
    groups = ", ".join(dict.fromkeys(batch.group_ids))
    return (
        f"the loss is not finite in a micro-batch of groups {groups[:300]}: {finite} of {len(logprobs_N)} log-probabilities are "
        f"finite, advantages lie in [{advantages.min(initial=0)}, {advantages.max(initial=0)}]; no weight was changed. If the "
        "log-probabilities are not finite the weights have diverged: go back to an earlier checkpoint with a lower learning rate"
    )
