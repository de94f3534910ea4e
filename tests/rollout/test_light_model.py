"""The light engine's forward pass equals transformers', and what it cannot serve it refuses in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.rollout.engines.light.kv_cache import Decode, KVCache, Prefill
from services.rollout.engines.light.model import ModelError, Qwen3, load
from tests.rollout import tiny

CPU = torch.device("cpu")


def logits_by_prefill(model: Qwen3, prompts: list[list[int]]) -> list[torch.Tensor]:
    length = 16 * -(-max(map(len, prompts)) // 16)
    cache = KVCache(model.config, 8 * 64, CPU, model.dtype)
    ids = torch.tensor([prompt + [0] * (length - len(prompt)) for prompt in prompts])
    positions = torch.arange(length).repeat(len(prompts))
    hidden = model.hidden(ids.flatten(), positions, Prefill(cache, torch.arange(len(prompts)), length))
    rows = model.logits(hidden).unflatten(0, (len(prompts), length))
    return [rows[i, : len(prompt)] for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("tied", [True, False])
def test_prefill_logits_equal_transformers(tmp_path: Path, tied: bool) -> None:
    reference = tiny.build(tmp_path, seed=3, tied=tied)
    ours = logits_by_prefill(load(tmp_path, CPU), tiny.PROMPTS)
    for prompt, logits in zip(tiny.PROMPTS, ours, strict=True):
        with torch.no_grad():
            expected = reference(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)


def test_decode_logits_equal_transformers(model) -> None:
    """Token by token through the cache, with rows of different lengths and more model rows than sequences."""
    qwen = load(model.folder, CPU)
    cache = KVCache(qwen.config, 4 * 64, CPU, qwen.dtype)
    prompts = [tiny.PROMPTS[0], tiny.PROMPTS[5]]
    for step in range(5):
        ids = torch.tensor([prompt[step] for prompt in prompts] + [0, 0])
        positions = torch.tensor([step, step, 0, 0])
        hidden = qwen.hidden(ids, positions, Decode(cache, positions[:2], step + 1))
        logits = qwen.logits(hidden[:2])
        for row, prompt in enumerate(prompts):
            with torch.no_grad():
                expected = model.reference(torch.tensor([prompt[: step + 1]])).logits[0, -1]
            torch.testing.assert_close(logits[row], expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_read_and_written_under_their_hugging_face_names(tmp_path: Path, tied: bool) -> None:
    reference = tiny.build(tmp_path / "a", seed=4, tied=tied)
    tiny.build(tmp_path / "b", seed=5, tied=tied)
    qwen = load(tmp_path / "b", CPU)
    expected = dict(reference.named_parameters())
    assert set(qwen.parameters) == set(expected)
    for name, tensor in expected.items():
        assert not torch.equal(qwen.parameters[name].read(), tensor)
        qwen.parameters[name].write(tensor)
        assert torch.equal(qwen.parameters[name].read(), tensor)


def test_a_sharded_folder_is_read(model, tmp_path: Path) -> None:
    tensors = load_file(model.folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(names)}
    for part in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == part}, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text((model.folder / "config.json").read_text())
    qwen = load(tmp_path, CPU)
    assert all(torch.equal(qwen.parameters[name].read(), tensor) for name, tensor in tensors.items())


def changed(folder: Path, target: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return target


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "does not know LlamaForCausalLM; it knows Qwen3ForCausalLM"),
        ({"architectures": None, "model_type": "bert"}, "model_type 'bert'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 32}, "do not fit config.json"),
        ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight: missing"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(
    model, tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        load(changed(model.folder, tmp_path, **changes), CPU)


def test_a_folder_without_a_model_is_refused_in_words(model, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Hugging Face model folder"):
        load(tmp_path, CPU)
    (tmp_path / "config.json").write_text((model.folder / "config.json").read_text())
    with pytest.raises(ModelError, match="neither model.safetensors"):
        load(tmp_path, CPU)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path, CPU)


def test_stop_ids_come_from_the_generation_config_first(model, tmp_path: Path) -> None:
    folder = changed(model.folder, tmp_path)
    assert load(folder, CPU).config.eos_ids == {tiny.EOS}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(folder, CPU).config.eos_ids == {7, 9}
