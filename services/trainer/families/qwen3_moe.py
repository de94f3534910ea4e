"""Qwen3 with a mixture of experts: Qwen3's attention, and a router with experts in place of the MLP of most layers."""

from __future__ import annotations

from services.trainer.families.architecture import Architecture, Experts, Fields
from services.trainer.families.entries import ATTENTION, EXPERT, MLP, NORMS, QK_NORM, ROUTER

LAYER = (*NORMS, *ATTENTION, *QK_NORM, *MLP)
EXPERTS_LAYER = (*NORMS, *ATTENTION, *QK_NORM, *ROUTER, *EXPERT)


def read(fields: Fields) -> Architecture:
    fields.require("attention_bias", False)
    fields.require("use_sliding_window", False)
    step, dense = int(fields.get("decoder_sparse_step", 1)), set(fields.get("mlp_only_layers", []))
    experts = Experts(
        count=int(fields.get("num_experts", None) or fields["num_local_experts"]),  # the newer spelling
        top_k=int(fields["num_experts_per_tok"]),
        ffn=int(fields["moe_intermediate_size"]),
        normalised=bool(fields.get("norm_topk_prob", False)),
        layers=tuple(
            i not in dense and step > 0 and (i + 1) % step == 0 for i in range(int(fields["num_hidden_layers"]))
        ),
    )
    return fields.decoder("qwen3_moe", qk_norm=True, experts=experts)
