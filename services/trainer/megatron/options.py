"""Megatron's native options: which a run file may set, and Megatron's config made of them, the layout and the architecture.

Options pass through under their own names. What config.json decides, and what the trainer's own bookkeeping depends on, is
refused with the reason (`NativeOptionError`); Megatron's own refusals come under the same type. tests/trainer/test_megatron.py.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from services.trainer.layout import Layout
from services.trainer.model_folder import Architecture


class NativeOptionError(ValueError):
    """An option under `trainer.megatron` cannot be used. The text names it and says what to do."""


_FROM_CONFIG_JSON = "is decided by the model folder's config.json"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
            *("normalization", "layernorm_epsilon", "gated_linear_unit", "activation_func", "add_bias_linear"),
            *("add_qkv_bias", "qk_layernorm", "layernorm_zero_centered_gamma", "num_moe_experts", "moe_router_topk"),
            *("moe_ffn_hidden_size", "moe_layer_freq", "moe_router_pre_softmax"),
        ),
        _FROM_CONFIG_JSON,
    ),
    **dict.fromkeys(("params_dtype", "bf16", "fp16", "pipeline_dtype"), "is set by model.dtype"),
    **dict.fromkeys(
        ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "optimizer"),
        "is set by trainer.optimizer",
    ),
    **dict.fromkeys(
        ("overlap_grad_reduce", "overlap_param_gather", "overlap_param_gather_with_optimizer_step"),
        "cannot be used: gradients are reduced once an update, not once a micro-batch",
    ),
    "calculate_per_token_loss": "is always on: gradients are summed over micro-batches and divided once an update",
    "num_distributed_optimizer_instances": "cannot be used: checkpoints are put together from one instance",
    "moe_grouped_gemm": "cannot be used: the weight map names experts one by one",
    "multi_latent_attention": _FROM_CONFIG_JSON,
    "mtp_num_layers": "cannot be used: multi-token prediction is not trained",
    "variable_seq_lengths": "is set by the trainer: packed micro-batches differ in length",
    "finalize_model_grads_func": "is set by the trainer",
    "no_sync_func": "is set by the trainer",
}
"""Native options that a run file may not set, and why."""


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """`trainer.megatron` sorted by the Megatron dataclass that has the field; a field of several goes to all of them."""

    transformer: dict[str, Any]
    optimizer: dict[str, Any]
    ddp: dict[str, Any]


def native_options(options: dict[str, Any]) -> NativeOptions:
    """Check and sort the run file's native options, or raise NativeOptionError."""
    targets = {"transformer": TransformerConfig, "optimizer": OptimizerConfig, "ddp": DistributedDataParallelConfig}
    fields = {target: {field.name for field in dataclasses.fields(kind)} for target, kind in targets.items()}
    known = set().union(*fields.values())
    for name in options:
        if name in REFUSED:
            raise NativeOptionError(f"trainer.megatron.{name}: {REFUSED[name]}; remove it")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see Megatron's TransformerConfig for the names"
            raise NativeOptionError(f"trainer.megatron.{name}: Megatron has no such option; {hint}")
    return NativeOptions(**{target: {k: v for k, v in options.items() if k in fields[target]} for target in targets})


def transformer_config(
    architecture: Architecture, dtype: torch.dtype, native: dict[str, Any], layout: Layout
) -> TransformerConfig:
    """Megatron's config for this architecture. Fused kernels that need Transformer Engine or Apex are off by default."""
    cuda = torch.cuda.is_available()
    defaults: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        # Megatron's own SwiGLU is faster than torch's only where it is compiled, and compat.py compiles nothing on a CPU.
        "bias_activation_fusion": cuda,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        # Weights always come from the folder: drawing random ones first would only cost time.
        "perform_initialization": False,
        "use_cpu_initialization": not cuda,
        # gloo has no batched exchange between neighbours.
        "batch_p2p_comm": cuda,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
    }
    try:
        return TransformerConfig(
            num_layers=architecture.layers,
            hidden_size=architecture.hidden,
            num_attention_heads=architecture.heads,
            num_query_groups=architecture.kv_heads,
            kv_channels=architecture.head_dim,
            ffn_hidden_size=architecture.ffn,
            normalization="RMSNorm",
            layernorm_epsilon=architecture.norm_eps,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            add_qkv_bias=architecture.qkv_bias,
            qk_layernorm=architecture.qk_norm,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            calculate_per_token_loss=True,
            variable_seq_lengths=layout.pipeline > 1 and not layout.virtual,
            **_experts(architecture),
            **{**defaults, **native},
        )
    except (AssertionError, ValueError, TypeError) as error:
        raise NativeOptionError(f"trainer.megatron: Megatron refuses this combination of options: {error}") from error


def _experts(architecture: Architecture) -> dict[str, Any]:
    experts = architecture.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [int(has) for has in experts.layers],
        # Softmax over the chosen experts only is what normalising their probabilities gives.
        "moe_router_pre_softmax": not experts.normalised,
    }
