"""A folder that cannot be trained from is refused with what is wrong and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.trainer.model_folder import ModelFolderError, check_same_vocabulary, read_architecture

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}


def write(folder: Path, **changes: Any) -> Path:
    config = {**QWEN3, **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


def test_reads_a_published_config(tmp_path: Path) -> None:
    found = read_architecture(write(tmp_path))
    assert (found.layers, found.heads, found.kv_heads, found.head_dim, found.ffn) == (28, 16, 8, 128, 3072)
    assert (found.rope_theta, found.tied) == (1e6, True)


def test_reads_the_newer_spelling_of_rope(tmp_path: Path) -> None:
    folder = write(tmp_path, rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert read_architecture(folder).rope_theta == 5e5


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="no such folder"):
        read_architecture(tmp_path / "absent")


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelFolderError, match="not a folder"):
        read_architecture(tmp_path / "model.gguf")


def test_no_config_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelFolderError, match=r"no config\.json \(found: model\.bin\)"):
        read_architecture(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_config_that_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        read_architecture(tmp_path)


def test_other_family_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        ModelFolderError, match=r"model_type is 'gemma3'.*known families: llama, qwen2, qwen3, qwen3_moe"
    ):
        read_architecture(write(tmp_path, model_type="gemma3"))


def test_experts_and_which_layers_have_them(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        model_type="qwen3_moe",
        num_hidden_layers=4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    )
    experts = read_architecture(folder).experts
    assert experts is not None
    assert (experts.count, experts.top_k, experts.ffn, experts.normalised) == (128, 8, 768, True)
    assert experts.layers == (False, True, False, False)


def test_families_differ_in_biases_and_norms(tmp_path: Path) -> None:
    found = {family: read_architecture(write(tmp_path, model_type=family)) for family in ("llama", "qwen2", "qwen3")}
    assert {family: (a.qkv_bias, a.qk_norm) for family, a in found.items()} == {
        "llama": (False, False),
        "qwen2": (True, False),
        "qwen3": (False, True),
    }


def test_llama_3_stretches_its_rotary_positions(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert read_architecture(write(tmp_path, model_type="llama", rope_parameters=rope)).rope_factor == 32.0
    with pytest.raises(ModelFolderError, match=r"rope high_freq_factor is 8; Megatron supports 4\.0 only"):
        read_architecture(write(tmp_path, model_type="llama", rope_parameters={**rope, "high_freq_factor": 8}))


def test_missing_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="'intermediate_size' is missing"):
        read_architecture(write(tmp_path, intermediate_size=...))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}),
    ],
)
def test_unsupported_variants_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    with pytest.raises(ModelFolderError, match="support"):
        read_architecture(write(tmp_path, **{field: value}))


def test_two_models_share_a_vocabulary_or_are_refused(tmp_path: Path) -> None:
    def folder(name: str, size: int, tokens: dict[str, int]) -> Path:
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps({"vocab_size": size}))
        added = [{"content": "<end>", "id": len(tokens)}]
        (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": added}))
        return path

    policy = folder("policy", 4, {"a": 0, "b": 1})
    check_same_vocabulary(policy, folder("same", 4, {"a": 0, "b": 1}))
    with pytest.raises(ModelFolderError, match="larger: vocab_size is 8, but the policy's .* is 4"):
        check_same_vocabulary(policy, folder("larger", 8, {"a": 0, "b": 1}))
    with pytest.raises(ModelFolderError, match="the token 'a' has the id 1, but 0 in the policy's tokenizer"):
        check_same_vocabulary(policy, folder("swapped", 4, {"a": 1, "b": 0}))
    with pytest.raises(ModelFolderError, match="nowhere: no such folder"):
        check_same_vocabulary(policy, tmp_path / "nowhere")
