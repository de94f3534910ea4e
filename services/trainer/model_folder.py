"""Reads a Hugging Face model folder: which architecture it holds and whether this trainer can train it.

Torch-free, so that a run file can be validated on any machine. Every refusal is a `ModelFolderError` that names the folder,
what is wrong and what to do. What each family makes of config.json is in families/.

Enforced by tests/trainer/test_model_folder.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.trainer.families import FAMILIES
from services.trainer.families.architecture import Architecture, Experts, Fields, ModelFolderError

__all__ = ["COPIED_FILES", "Architecture", "Experts", "ModelFolderError", "check_same_vocabulary", "read_architecture"]

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
    return FAMILIES[family].read(Fields(folder, config))


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
