"""Builds megatron-core's GPTModel for an architecture and a layout, with attention and scoring that fit packed sequences.

M tokens of a packed micro-batch on this rank, R of them from which it predicts, K ids asked for a token, H hidden size.

The model scores only the tokens that a loss needs, so the [M, vocabulary] logits never exist (scoring.py). With Transformer
Engine on CUDA its layers are used, without it Megatron's own with attention.py and an RMS norm of torch's. As a critic the model
has one value in place of the vocabulary. Parity with transformers: tests/trainer/test_families.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from services.trainer.families import Head
from services.trainer.layout import Layout
from services.trainer.megatron.attention import PackedAttention, PackedLayout
from services.trainer.megatron.scoring import Vocabulary, likeliest, score_tokens
from services.trainer.model_folder import Architecture

try:
    import transformer_engine  # type: ignore[import-not-found]  # noqa: F401

    TRANSFORMER_ENGINE = torch.cuda.is_available()
except ImportError:
    TRANSFORMER_ENGINE = False


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's constructor, and the mark by which its gradient is summed under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def block_spec(config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    """The layers of this rank's chunk `stage` of the model (None: it has one)."""
    if TRANSFORMER_ENGINE:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=stage)
    dense, experts = _layer(config, None), _layer(config, config.num_moe_experts)
    pattern = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    assert isinstance(pattern, list)
    if config.pipeline_model_parallel_layout is not None:
        numbers = config.pipeline_model_parallel_layout.get_layer_id_list(layer_type=LayerType.decoder, vp_stage=stage)
    else:
        first = get_transformer_layer_offset(config, vp_stage=stage)
        numbers = range(first, first + get_num_layers_to_build(config, vp_stage=stage))
    return TransformerBlockSubmodules(
        layer_specs=[experts if pattern[number] else dense for number in numbers], layer_norm=RMSNorm
    )


def _layer(config: TransformerConfig, experts: int | None) -> ModuleSpec:
    """Megatron's own layer, with modules of ours in place of those that need Transformer Engine for packed input."""
    spec = get_gpt_layer_local_spec(
        num_experts=experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    attention.core_attention = PackedAttention
    return spec


class PolicyModel(GPTModel):
    """GPTModel whose last stage gives log-probabilities of chosen tokens instead of logits of all."""

    def __init__(self, config: TransformerConfig, *args: Any, vocabulary: int, head: Head, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.true_vocabulary = vocabulary
        self.value_head: torch.nn.Linear | None = None
        if head == "value" and self.post_process:
            del self.output_layer
            self.value_head = torch.nn.Linear(config.hidden_size, 1)
            for parameter in self.value_head.parameters():
                torch.nn.init.zeros_(parameter)

    def forward(  # type: ignore[override]
        self,
        ids_M: torch.Tensor,
        positions_M: torch.Tensor,
        layout: PackedLayout,
        rows_R: torch.Tensor,
        ids_RK: torch.Tensor,
        temperature: float = 1.0,
        top: int = 0,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """On the last stage (log-probability of each id [R, K + top], entropy [R], ids of the `top` likeliest tokens [R, top]).

        The log-probabilities of the likeliest come after the ones asked for. A critic gives its value in place of the
        log-probability, and no entropy. Other stages give hidden states.
        """
        hidden_M1H = super().forward(ids_M[None], positions_M[None], None, packed_seq_params=layout)
        if not self.post_process:
            return hidden_M1H
        if self.value_head is not None:
            values_R1 = self.value_head(self._rows(hidden_M1H, rows_R, whole_gradient=True)).float()
            return values_R1.expand(ids_RK.shape), torch.zeros_like(values_R1[:, 0]), ids_RK[:, :0]
        hidden_RH = self._rows(hidden_M1H, rows_R, whole_gradient=False)
        weight_VH, vocabulary = self._output()
        top_RK = likeliest(hidden_RH, weight_VH, top, temperature, vocabulary) if top else ids_RK[:, :0]
        asked_RK = torch.cat([ids_RK, top_RK], 1) if top else ids_RK
        return *score_tokens(hidden_RH, weight_VH, asked_RK, temperature, vocabulary), top_RK

    def _rows(self, hidden_M1H: torch.Tensor, rows_R: torch.Tensor, *, whole_gradient: bool) -> torch.Tensor:
        """The hidden states to predict from, on each tensor-parallel rank. `whole_gradient`: each rank's gradient is of all."""
        if self.config.sequence_parallel:
            hidden_M1H = gather_from_sequence_parallel_region(
                hidden_M1H, tensor_parallel_output_grad=not whole_gradient
            )
        elif not whole_gradient:
            hidden_M1H = copy_to_tensor_model_parallel_region(hidden_M1H)
        return hidden_M1H[:, 0].index_select(0, rows_R)

    def _output(self) -> tuple[torch.Tensor, Vocabulary]:
        """This rank's output weight without fillers, and which part of the vocabulary it is."""
        weight_VH = self.output_layer.weight
        if weight_VH is None:
            weight_VH = self.shared_embedding_or_output_weight()
        ranks = self.tp_group.size()
        first = self.tp_group.rank() * len(weight_VH)
        if first + len(weight_VH) > self.true_vocabulary:
            weight_VH = weight_VH[: self.true_vocabulary - first]
        return weight_VH, Vocabulary(first, self.tp_group if ranks > 1 else None)

    def _preprocess(self, input_ids: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Megatron's hook before the decoder: rotate by the position of each token instead of by the sequences' bounds."""
        found = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        if TRANSFORMER_ENGINE:
            return found
        angles = torch.outer(position_ids[0].float(), self.rotary_pos_emb.inv_freq.to(position_ids.device))
        return (found[0], torch.cat((angles, angles), -1)[:, None], *found[2:])

    def _postprocess(self, hidden_states: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        """Megatron's hook between the decoder and the logits: hand back the hidden states."""
        return hidden_states


def build_chunks(
    architecture: Architecture, config: TransformerConfig, layout: Layout, head: Head = "vocabulary"
) -> list[PolicyModel]:
    """This rank's part of the model with weights not yet loaded: one chunk, or one for each virtual pipeline stage."""
    vocabulary = -(-architecture.vocab // layout.tensor) * layout.tensor
    build = partial(
        PolicyModel,
        config,
        vocab_size=vocabulary,
        max_sequence_length=architecture.max_positions,
        position_embedding_type="rope",
        rotary_base=architecture.rope_theta,  # type: ignore[arg-type]
        rope_scaling=architecture.rope_factor != 1.0,
        rope_scaling_factor=architecture.rope_factor,
        share_embeddings_and_output_weights=architecture.tied and head == "vocabulary",
        parallel_output=True,
        vocabulary=architecture.vocab,
        head=head,
    )
    chunks = []
    for stage in range(layout.virtual) if layout.virtual else (None,):
        where = {"ignore_virtual": False, "vp_stage": stage}
        chunks.append(
            build(
                transformer_layer_spec=block_spec(config, stage),
                pre_process=parallel_state.is_pipeline_first_stage(**where),
                post_process=parallel_state.is_pipeline_last_stage(**where),
                vp_stage=stage,
            )
        )
    return chunks
