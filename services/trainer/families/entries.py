"""The words in which a family's weight map is written: which Hugging Face tensors make one Megatron tensor, how they are laid
together, and along which side tensor parallelism cuts them. Data only; megatron/sharding.py and weights.py act on it.

`{i}` stands for the layer, `{e}` for the expert. The Megatron names are those of its plain layers; what Transformer Engine's
fused layers call differently is in `FUSED_NAMES`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Join = Literal["same", "qkv", "gate_up"]
Cut = Literal["whole", "rows", "columns"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron tensor and the Hugging Face tensors that it is made of."""

    megatron: str
    hf: tuple[str, ...]
    join: Join = "same"
    """qkv: for each key/value group the rows of its query heads, then its keys, then its values. gate_up: gate above up."""
    cut: Cut = "whole"
    """What a tensor-parallel rank holds: all of it, or a share of the rows or columns of each Hugging Face tensor."""
    expert: bool = False
    """Cut by the experts' own tensor parallelism, and held by the ranks of its expert only."""
    vocabulary: bool = False
    """Its rows are filled up to a multiple of the tensor-parallel size."""
    optional: bool = False
    """A folder without it is complete: the tensor then keeps the zeros it was made with."""

    def at(self, **where: int) -> Entry:
        """With layer and expert filled in."""
        return replace(self, megatron=self.megatron.format(**where), hf=tuple(name.format(**where) for name in self.hf))


MEGATRON, HF = "decoder.layers.{i}.", "model.layers.{i}."

EMBEDDING = Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), cut="rows", vocabulary=True)
FINAL_NORM = Entry("decoder.final_layernorm.weight", ("model.norm.weight",))
OUTPUT = Entry("output_layer.weight", ("lm_head.weight",), cut="rows", vocabulary=True)
"""Only where the output layer has a weight of its own."""
VALUE = tuple(Entry(f"value_head.{kind}", (f"value_head.{kind}",), optional=True) for kind in ("weight", "bias"))
"""A critic's, in place of the output layer."""

NORMS = (
    Entry(f"{MEGATRON}input_layernorm.weight", (f"{HF}input_layernorm.weight",)),
    Entry(f"{MEGATRON}pre_mlp_layernorm.weight", (f"{HF}post_attention_layernorm.weight",)),
)


def _qkv(kind: str) -> Entry:
    parts = tuple(f"{HF}self_attn.{x}_proj.{kind}" for x in "qkv")
    return Entry(f"{MEGATRON}self_attention.linear_qkv.{kind}", parts, "qkv", "rows")


ATTENTION = (
    _qkv("weight"),
    Entry(f"{MEGATRON}self_attention.linear_proj.weight", (f"{HF}self_attn.o_proj.weight",), cut="columns"),
)
QKV_BIAS = (_qkv("bias"),)
QK_NORM = tuple(
    Entry(f"{MEGATRON}self_attention.{x}_layernorm.weight", (f"{HF}self_attn.{x}_norm.weight",)) for x in "qk"
)


def mlp(megatron: str, hf: str, expert: bool = False) -> tuple[Entry, ...]:
    """A SwiGLU under these names."""
    gate_up = tuple(f"{hf}.{x}_proj.weight" for x in ("gate", "up"))
    return (
        Entry(f"{megatron}.linear_fc1.weight", gate_up, "gate_up", "rows", expert),
        Entry(f"{megatron}.linear_fc2.weight", (f"{hf}.down_proj.weight",), cut="columns", expert=expert),
    )


MLP = mlp(f"{MEGATRON}mlp", f"{HF}mlp")
ROUTER = (Entry(f"{MEGATRON}mlp.router.weight", (f"{HF}mlp.gate.weight",)),)
EXPERT = mlp(f"{MEGATRON}mlp.experts.local_experts.{{e}}", f"{HF}mlp.experts.{{e}}", expert=True)

FUSED_NAMES = (
    ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
)
"""(name in Transformer Engine's fused layers, name here)."""
