"""How the trainer's ranks share the model: read from the native options, checked before anything is built. Torch-free.

A refusal is a `LayoutError` that names the option, the number it does not fit, and what would. Megatron's own checks come on top
of these when it builds the model. tests/trainer/test_layout.py; that each layout computes the same is tests/trainer/layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.trainer.families.architecture import Architecture


class LayoutError(ValueError):
    """The options of `trainer.megatron` do not fit the model or the number of ranks."""


SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
}
OWN_STAGES = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""With these the run file says itself which stage has which layers."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel groups. Megatron's order of ranks: tensor, context, expert, data, pipeline."""

    ranks: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    """Chunks of the model a pipeline rank holds, in turn."""
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False
    """Sequence parallelism: norms and dropout work on a share of the tokens each."""
    distributed_optimizer: bool = False
    """Optimiser states are cut over the data-parallel ranks."""

    @property
    def data(self) -> int:
        """Replicas of the model. Each gets micro-batches of its own."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def in_step(self) -> bool:
        """Replicas exchange tokens in each layer, so all must run equally many micro-batches."""
        return self.expert > 1

    @property
    def align_sequence(self) -> int:
        """A sequence is filled up to a multiple of this: each context-parallel rank gets two pieces of it."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def align_total(self) -> int:
        """All tokens of a micro-batch together are filled up to a multiple of this."""
        return self.align_sequence * (self.tensor if self.sequence else 1)


def layout_of(options: Mapping[str, Any], ranks: int, architecture: Architecture | None = None) -> Layout:
    """The layout that `trainer.megatron` asks for on this many ranks, or LayoutError."""
    sizes = {field: _size(options, name) for name, field in SIZES.items()}
    virtual = options.get("virtual_pipeline_model_parallel_size")
    layout = Layout(
        ranks=ranks,
        **sizes,
        virtual=None if virtual is None else _size(options, "virtual_pipeline_model_parallel_size"),
        expert_tensor=_size(options, "expert_tensor_parallel_size", sizes["tensor"]),
        sequence=bool(options.get("sequence_parallel", False)),
        distributed_optimizer=bool(options.get("use_distributed_optimizer", False)),
    )
    _check_ranks(layout)
    if architecture is not None:
        _check_model(layout, architecture, own_stages=any(name in options for name in OWN_STAGES))
    return layout


def _size(options: Mapping[str, Any], name: str, default: int = 1) -> int:
    value = options.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayoutError(f"trainer.megatron.{name}: {value!r} is no size; give a whole number from 1")
    return value


def _check_ranks(layout: Layout) -> None:
    one = layout.tensor * layout.pipeline * layout.context
    if layout.ranks % one:
        raise LayoutError(
            f"trainer.megatron: tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context} = {one} ranks a "
            f"replica do not divide the {layout.ranks} ranks there are; set trainer.ranks to a multiple of {one}"
        )
    experts = layout.expert * layout.expert_tensor * layout.pipeline
    if layout.ranks % experts:
        raise LayoutError(
            f"trainer.megatron.expert_model_parallel_size: {layout.expert} x expert tensor {layout.expert_tensor} x pipeline "
            f"{layout.pipeline} = {experts} does not divide the {layout.ranks} ranks; set trainer.ranks to a multiple of it, or "
            "lower expert_tensor_parallel_size"
        )
    if layout.sequence and layout.tensor == 1:
        raise LayoutError(
            "trainer.megatron.sequence_parallel: shares tokens between tensor-parallel ranks, and there is one; remove it or "
            "raise tensor_model_parallel_size"
        )
    if layout.virtual is not None and layout.pipeline == 1:
        raise LayoutError(
            "trainer.megatron.virtual_pipeline_model_parallel_size: needs pipeline_model_parallel_size of at least 2"
        )


def _check_model(layout: Layout, architecture: Architecture, own_stages: bool) -> None:
    cuts = [
        ("tensor_model_parallel_size", layout.tensor, "key/value heads", architecture.kv_heads),
        ("tensor_model_parallel_size", layout.tensor, "attention heads", architecture.heads),
        ("tensor_model_parallel_size", layout.tensor, "MLP columns", architecture.ffn),
    ]
    if not own_stages:
        stages = layout.pipeline * (layout.virtual or 1)
        cuts.append(("pipeline_model_parallel_size", stages, "layers", architecture.layers))
    if architecture.experts is not None:
        cuts.append(("expert_model_parallel_size", layout.expert, "experts", architecture.experts.count))
        cuts.append(("expert_tensor_parallel_size", layout.expert_tensor, "expert columns", architecture.experts.ffn))
    for name, size, what, number in cuts:
        if number % size:
            raise LayoutError(f"trainer.megatron.{name}: {size} does not divide the model's {number} {what}")
    if architecture.experts is None and (layout.expert > 1 or layout.expert_tensor != layout.tensor):
        raise LayoutError(
            f"trainer.megatron: expert parallelism is set, but {architecture.family} has no experts; remove those options"
        )
    if architecture.experts is not None and layout.tensor > 1 and not layout.sequence:
        raise LayoutError(
            "trainer.megatron.sequence_parallel: must be true for a model with experts when tensor_model_parallel_size is "
            "above 1; Megatron trains it in no other way"
        )
