"""Builds megatron-core's GPTModel for a model folder, with attention and scoring that fit packed sequences.

T tokens of a packed micro-batch, S sequences in it, N tokens to be scored, H hidden size, V vocabulary, B sequences of one
length L, Q query heads, K key/value heads, D head size.

The model scores only the N tokens that a loss needs, in float32 and in chunks, so the [T, V] logits never exist. Attention
is causal and never crosses a sequence boundary: packing changes nothing but rounding (tests/trainer/test_megatron.py).
Options of Megatron pass through under their own names; what config.json decides, and what the trainer's own bookkeeping
depends on, is refused with the reason (`NativeOptionError`).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch.utils.checkpoint import checkpoint

from services.trainer.model_folder import Architecture

LOGIT_ELEMENTS = 1 << 24
"""Logits held at once while scoring: 64 MiB in float32. A longer list of tokens is scored in chunks, recomputed backwards."""


Scores = tuple[torch.Tensor, ...]
"""(log-probability [N], entropy [N]), and the log-probabilities [N, K] of other ids where they were asked for."""


class NativeOptionError(ValueError):
    """An option under `trainer.megatron` cannot be used. The text names it and says what to do."""


# ------------------------------------------------------------------------------------------------------- native options

_FROM_CONFIG_JSON = "is decided by the model folder's config.json"
_ONE_RANK = "needs several trainer ranks; this trainer runs one"
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"),
            *("normalization", "layernorm_epsilon", "gated_linear_unit", "activation_func", "add_bias_linear"),
            *("add_qkv_bias", "qk_layernorm", "layernorm_zero_centered_gamma"),
        ),
        _FROM_CONFIG_JSON,
    ),
    **dict.fromkeys(("params_dtype", "bf16", "fp16", "pipeline_dtype"), "is set by model.dtype"),
    **dict.fromkeys(
        ("lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"), "is set by trainer.optimizer"
    ),
    **dict.fromkeys(
        (
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
            *("expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
            *("virtual_pipeline_model_parallel_size", "use_distributed_optimizer", "overlap_param_gather"),
        ),
        _ONE_RANK,
    ),
    "calculate_per_token_loss": "is always on: gradients are summed over micro-batches and divided once an update",
    "overlap_grad_reduce": "cannot be used: gradients are reduced once an update, not once a micro-batch",
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


def transformer_config(architecture: Architecture, dtype: torch.dtype, native: dict[str, Any]) -> TransformerConfig:
    """Megatron's config for this architecture. Fused kernels that need Transformer Engine or Apex are off by default."""
    defaults: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        # Megatron's own SwiGLU is faster than torch's only where it is compiled, and compat.py compiles nothing on a CPU.
        "bias_activation_fusion": torch.cuda.is_available(),
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        # Weights always come from the folder: drawing random ones first would only cost time.
        "perform_initialization": False,
        "use_cpu_initialization": not torch.cuda.is_available(),
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
            add_qkv_bias=False,
            qk_layernorm=True,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            calculate_per_token_loss=True,
            **{**defaults, **native},
        )
    except (AssertionError, ValueError, TypeError) as error:
        raise NativeOptionError(f"trainer.megatron: Megatron refuses this combination of options: {error}") from error


# ------------------------------------------------------------------------------------------------------------- the model


@dataclass
class PackedLayout(PackedSeqParams):
    """Megatron's description of a packed micro-batch, with what the attention below needs in addition."""

    runs: tuple[tuple[int, int], ...] = ()
    """(B, L) of neighbouring sequences of equal length, in order: each run is one attention call without padding."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> PackedLayout:
        """The layout of sequences of these lengths, laid one after another."""
        bounds_S = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        runs: list[tuple[int, int]] = []
        for length in lengths:
            count = runs.pop()[0] if runs and runs[-1][1] == length else 0
            runs.append((count + 1, length))
        longest = max(lengths)
        return cls("thd", bounds_S, bounds_S, max_seqlen_q=longest, max_seqlen_kv=longest, runs=tuple(runs))


class PackedAttention(MegatronModule):
    """Core attention over packed sequences with torch's scaled_dot_product_attention: one call a run of equal lengths."""

    def __init__(
        self, config: TransformerConfig, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.dropout = config.attention_dropout

    def forward(
        self,
        query_TQD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedLayout,
        **_kwargs: Any,
    ) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        grouped = query_TQD.size(1) != key_TKD.size(1)
        outputs, start = [], 0
        for count, length in packed_seq_params.runs:
            end = start + count * length
            query, key, value = (
                x[start:end].unflatten(0, (count, length)).transpose(1, 2) for x in (query_TQD, key_TKD, value_TKD)
            )
            output_BQLD = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, dropout_p=dropout, scale=self.scale, enable_gqa=grouped
            )
            outputs.append(output_BQLD.transpose(1, 2).flatten(0, 1))
            start = end
        return torch.cat(outputs).flatten(1) if len(outputs) > 1 else outputs[0].flatten(1)


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)


def layer_spec() -> ModuleSpec:
    """Megatron's own layer, with the two modules above in place of those that need Transformer Engine for packed input."""
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    return spec


class PolicyModel(GPTModel):
    """GPTModel whose forward pass gives log-probabilities of chosen tokens instead of logits of all."""

    def forward(  # type: ignore[override]
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        layout: PackedLayout,
        rows_N: torch.Tensor,
        targets_N: torch.Tensor,
        temperature: float = 1.0,
        others_NK: torch.Tensor | None = None,
    ) -> Scores:
        """(log-probability, entropy) of `targets_N`, each predicted from the hidden state at `rows_N`, in float32; with
        `others_NK` the log-probabilities of these ids at the same places too."""
        hidden_T1H = super().forward(ids_T[None], positions_T[None], None, packed_seq_params=layout)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        project = partial(self.output_layer, weight=weight)
        rows = max(1, LOGIT_ELEMENTS // self.vocab_size)
        return score_tokens(hidden_T1H.index_select(0, rows_N), project, targets_N, temperature, rows, others_NK)

    def _postprocess(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """Megatron's hook between the decoder and the logits: hand back the hidden states."""
        return hidden_states


def score_tokens(
    hidden_N1H: torch.Tensor,
    project: Callable[[torch.Tensor], tuple[torch.Tensor, Any]],
    targets_N: torch.Tensor,
    temperature: float,
    rows: int,
    others_NK: torch.Tensor | None = None,
) -> Scores:
    """Log-probability and entropy of each target under softmax(logits / temperature), `rows` of them at a time, and the
    log-probabilities of `others_NK` if there are any.

    The entropy carries no gradient.
    """

    def score(hidden_C1H: torch.Tensor, targets_C: torch.Tensor, others_CK: torch.Tensor | None = None) -> Scores:
        logits_CV = project(hidden_C1H)[0].squeeze(1).float()
        if temperature != 1.0:
            logits_CV = logits_CV / temperature
        all_logprobs_CV = F.log_softmax(logits_CV, dim=-1)
        with torch.no_grad():
            entropy_C = -(all_logprobs_CV.exp() * all_logprobs_CV).sum(-1)
        logprobs_C = all_logprobs_CV.gather(1, targets_C[:, None]).squeeze(1)
        return (logprobs_C, entropy_C, *(() if others_CK is None else (all_logprobs_CV.gather(1, others_CK),)))

    columns = (hidden_N1H, targets_N, *(() if others_NK is None else (others_NK,)))
    if hidden_N1H.size(0) <= rows:
        return score(*columns)
    parts = [
        checkpoint(score, *chunk, use_reentrant=False)
        for chunk in zip(*(column.split(rows) for column in columns), strict=True)
    ]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def build_model(
    architecture: Architecture, config: TransformerConfig, kind: type[PolicyModel] = PolicyModel
) -> PolicyModel:
    """The model with weights not yet loaded."""
    layer = layer_spec()
    block = TransformerBlockSubmodules(layer_specs=[layer] * architecture.layers, layer_norm=RMSNorm)
    return kind(
        config,
        block,
        vocab_size=architecture.vocab,
        max_sequence_length=architecture.max_positions,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,  # type: ignore[arg-type]
        share_embeddings_and_output_weights=architecture.tied,
        parallel_output=True,
    )
