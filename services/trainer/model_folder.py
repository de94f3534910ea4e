"""Reads a Hugging Face model folder: which architecture it holds and whether this trainer can train it.

Torch-free, so that a run file can be validated on any machine. Every refusal is a `ModelFolderError` that names the folder,
what is wrong and what to do. A family is added by one entry in `FAMILIES` and one weight map in `megatron/weights.py`.

Enforced by tests/trainer/test_model_folder.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
)
"""What makes a folder complete beside its weights: glob patterns."""


class ModelFolderError(ValueError):
    """The folder cannot be trained from. The text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers of config.json that shape a dense decoder."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    tied: bool
    """Output layer shares the embedding's weight."""


def read_architecture(folder: str | Path) -> Architecture:
    """The architecture of a model folder, or ModelFolderError."""
    folder = Path(folder)
    config = read_config(folder)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ModelFolderError(
            f"{folder}/config.json: model_type is {family!r}, which this trainer does not know; "
            f"known families: {', '.join(sorted(FAMILIES))}"
        )
    try:
        return FAMILIES[family](folder, config)
    except KeyError as error:
        raise ModelFolderError(
            f"{folder}/config.json: field {error.args[0]!r} is missing; is the file complete?"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as a dictionary, or ModelFolderError."""
    if not folder.exists():
        raise ModelFolderError(
            f"{folder}: no such folder; model.path must be a Hugging Face model folder on this machine"
        )
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: not a folder; model.path must be the folder that holds config.json")
    path = folder / "config.json"
    if not path.is_file():
        present = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise ModelFolderError(f"{folder}: no config.json (found: {present}); save the model with save_pretrained")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise ModelFolderError(f"{path}: expected an object at the top level, got {type(config).__name__}")
    return config


def check_same_vocabulary(policy: Path, other: Path) -> None:
    """ModelFolderError unless both folders give each token the same id: else one model's numbers mean nothing to the other."""
    sizes = [read_config(folder).get("vocab_size") for folder in (policy, other)]
    if sizes[0] != sizes[1]:
        raise ModelFolderError(
            f"{other}: vocab_size is {sizes[1]}, but the policy's ({policy}) is {sizes[0]}; both must share one tokenizer"
        )
    tokens = [_vocabulary(folder) for folder in (policy, other)]
    if tokens[0] != tokens[1]:
        odd = next(token for token in {**tokens[0], **tokens[1]} if tokens[0].get(token) != tokens[1].get(token))
        raise ModelFolderError(
            f"{other}: the token {odd!r} has the id {tokens[1].get(odd)}, but {tokens[0].get(odd)} in the policy's tokenizer "
            f"({policy}); both must share one tokenizer"
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    """Token -> id, from tokenizer.json; empty if the folder has another kind of tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    try:
        tokenizer = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = tokenizer["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram: [token, score] in the order of ids
            vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
        return {**vocabulary, **{entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelFolderError(f"{path}: cannot be read as a tokenizer ({error!r})") from error


def _qwen3(folder: Path, config: dict[str, Any]) -> Architecture:
    _require(folder, config, "hidden_act", "silu")
    _require(folder, config, "attention_bias", False)
    _require(folder, config, "use_sliding_window", False)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelFolderError(f"{folder}/config.json: rope type {kind!r} is not supported; only 'default' is")
    heads = int(config["num_attention_heads"])
    return Architecture(
        family="qwen3",
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        ffn=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        max_positions=int(config.get("max_position_embeddings", 32768)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def _require(folder: Path, config: dict[str, Any], field: str, value: Any) -> None:
    found = config.get(field, value)
    if found != value:
        raise ModelFolderError(f"{folder}/config.json: {field} is {found!r}; this trainer supports {value!r} only")


FAMILIES: dict[str, Callable[[Path, dict[str, Any]], Architecture]] = {"qwen3": _qwen3}
"""model_type of config.json -> reader of its shape."""
