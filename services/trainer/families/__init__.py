"""The model families that the trainer knows: how config.json is read, and the map between Hugging Face's and Megatron's weights.

One small file a family, torch-free. docs/models.md says how to write one. Enforced by tests/trainer/test_families.py, which
compares logits with transformers and takes every family there and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from services.trainer.families import llama, qwen2, qwen3, qwen3_moe
from services.trainer.families.architecture import Architecture, Fields
from services.trainer.families.entries import EMBEDDING, FINAL_NORM, OUTPUT, VALUE, Entry


@dataclass(frozen=True, slots=True)
class Family:
    """What a family's file declares."""

    read: Callable[[Fields], Architecture]
    layer: tuple[Entry, ...]
    """Of a layer with a dense MLP."""
    experts_layer: tuple[Entry, ...] = ()
    """Of a layer with experts; entries marked `expert` stand for each of them."""


FAMILIES: dict[str, Family] = {
    "llama": Family(llama.read, llama.LAYER),
    "qwen2": Family(qwen2.read, qwen2.LAYER),
    "qwen3": Family(qwen3.read, qwen3.LAYER),
    "qwen3_moe": Family(qwen3_moe.read, qwen3_moe.LAYER, qwen3_moe.EXPERTS_LAYER),
}
"""`model_type` of config.json -> family."""


Head = Literal["vocabulary", "value"]
"""What stands on top of the last layer: logits, or a critic's value."""


def weight_map(architecture: Architecture, head: Head = "vocabulary") -> list[Entry]:
    """Every Megatron tensor of this architecture, from the embedding to the output layer, all experts listed."""
    entries = [EMBEDDING]
    for i in range(architecture.layers):
        entries += _layer(architecture, i)
    if head == "value":
        return [*entries, FINAL_NORM, *VALUE]
    return [*entries, FINAL_NORM, *(() if architecture.tied else (OUTPUT,))]


def _layer(architecture: Architecture, i: int) -> list[Entry]:
    family, experts = FAMILIES[architecture.family], architecture.experts
    if experts is None or not experts.layers[i]:
        return [entry.at(i=i) for entry in family.layer]
    common = [entry.at(i=i) for entry in family.experts_layer if not entry.expert]
    each = [entry for entry in family.experts_layer if entry.expert]
    return common + [entry.at(i=i, e=e) for e in range(experts.count) for entry in each]
