"""Small models of each family as transformers writes them, with norms and biases that are not all alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCABULARY = 97
"""Odd, so that tensor parallelism has to fill it up."""

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.1,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def build_model(folder: Path, family: str = "qwen3", *, tied: bool = False, seed: int = 0, **changes: Any) -> Path:
    """A model folder without a tokenizer."""
    import torch
    import transformers

    kinds = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {}),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, EXPERTS),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"head_dim": 8}),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    }
    config_kind, model_kind, own = kinds[family]
    torch.manual_seed(seed)
    config = config_kind(**{**SHAPE, **own, "tie_word_embeddings": tied, **changes})
    model = model_kind(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder
