"""A layout that does not fit the model or the ranks is refused with the option, the number and the fix."""

from __future__ import annotations

from typing import Any

import pytest

from services.trainer.families.architecture import Architecture, Experts
from services.trainer.layout import Layout, LayoutError, layout_of

DENSE = Architecture(
    family="qwen3",
    layers=4,
    hidden=64,
    heads=8,
    kv_heads=4,
    head_dim=16,
    ffn=96,
    vocab=97,
    max_positions=256,
    norm_eps=1e-6,
    rope_theta=1e4,
    tied=True,
)
EXPERTS = Experts(count=4, top_k=2, ffn=32, normalised=True, layers=(True,) * 4)
MIXTURE = Architecture(
    family="qwen3_moe",
    layers=4,
    hidden=64,
    heads=8,
    kv_heads=4,
    head_dim=16,
    ffn=96,
    vocab=97,
    max_positions=256,
    norm_eps=1e-6,
    rope_theta=1e4,
    tied=False,
    experts=EXPERTS,
)
T, P, C = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
E, ET, V = "expert_model_parallel_size", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"


def test_one_rank_needs_no_options() -> None:
    assert layout_of({}, 1, DENSE) == Layout()


def test_what_is_left_over_makes_replicas() -> None:
    layout = layout_of({T: 2, C: 2, "sequence_parallel": True}, 16, DENSE)
    assert (layout.data, layout.align_sequence, layout.align_total) == (4, 4, 8)
    assert not layout.in_step
    assert layout_of({E: 2, T: 2, "sequence_parallel": True}, 4, MIXTURE).in_step


@pytest.mark.parametrize(
    ("options", "ranks", "text"),
    [
        ({T: 2}, 3, r"= 2 ranks a replica do not divide the 3 ranks.*trainer\.ranks to a multiple of 2"),
        ({T: 0}, 1, r"tensor_model_parallel_size: 0 is no size"),
        ({T: "2"}, 2, r"tensor_model_parallel_size: '2' is no size"),
        ({T: 8}, 8, "8 does not divide the model's 4 key/value heads"),
        ({P: 3}, 3, "pipeline_model_parallel_size: 3 does not divide the model's 4 layers"),
        ({P: 2, V: 3}, 2, "6 does not divide the model's 4 layers"),
        ({V: 2}, 1, "virtual_pipeline_model_parallel_size: needs pipeline_model_parallel_size of at least 2"),
        ({"sequence_parallel": True}, 2, "sequence_parallel: shares tokens between tensor-parallel ranks"),
        ({E: 2}, 2, "qwen3 has no experts"),
        ({T: 2, ET: 1}, 2, "qwen3 has no experts"),
    ],
)
def test_refusals(options: dict[str, Any], ranks: int, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        layout_of(options, ranks, DENSE)


@pytest.mark.parametrize(
    ("options", "ranks", "text"),
    [
        ({T: 2}, 2, r"sequence_parallel: must be true for a model with experts"),
        ({E: 3}, 3, "3 does not divide the model's 4 experts"),
        (
            {E: 4, T: 2, "sequence_parallel": True},
            4,
            r"4 x expert tensor 2 x pipeline 1 = 8 does not divide the 4 ranks",
        ),
    ],
)
def test_refusals_with_experts(options: dict[str, Any], ranks: int, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        layout_of(options, ranks, MIXTURE)


def test_stages_that_the_run_file_cuts_itself_are_left_to_megatron() -> None:
    assert layout_of({P: 3, "num_layers_in_first_pipeline_stage": 2}, 3, DENSE).pipeline == 3
