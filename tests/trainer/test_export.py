"""An exported checkpoint is a model folder that transformers reads, and the same weights whoever saved them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from services.controller.cli import app
from services.trainer.checkpoint import CheckpointError, CheckpointStore
from services.trainer.export import export, find
from tests.trainer.policies import equal, save, train, weights


@pytest.fixture
def saved(make_policy: Callable[..., Any], tied_folder: Path, tmp_path: Path) -> tuple[Path, Any]:
    """(a work folder with two checkpoints, the policy as the newer one has it)."""
    model = shutil.copytree(tied_folder, tmp_path / "base")
    (model / "tokenizer.json").write_text("{}")
    policy = make_policy(model)
    store = CheckpointStore(tmp_path / "work/checkpoints", model_folder=model)
    for step in (1, 2):
        train(policy, range(step))
        save(store, step, policy, {})
    shutil.rmtree(model)  # a checkpoint needs nothing beside it
    return tmp_path / "work", policy


def test_the_newest_becomes_a_model_folder(saved: tuple[Path, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    work, policy = saved
    assert find(work) == find(work / "checkpoints") == find(find(work))
    assert export(find(work), tmp_path / "out") == ["model.safetensors"]
    assert equal(load_file(tmp_path / "out/model.safetensors"), weights(policy))
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.get_parameter("model.norm.weight"), dict(policy.hf_tensors())["model.norm.weight"])


def test_cast_and_sharded(saved: tuple[Path, Any], tmp_path: Path) -> None:
    work, policy = saved
    files = export(find(work), tmp_path / "out", "bfloat16", max_shard_bytes=20_000)
    assert len(files) > 2
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    found = {name: tensor for file in files for name, tensor in load_file(tmp_path / "out" / file).items()}
    assert equal(found, {name: tensor.bfloat16() for name, tensor in weights(policy).items()})
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_float32_of_a_bfloat16_policy_takes_the_float32_copies(
    make_policy: Callable[..., Any], tied_folder: Path, tmp_path: Path
) -> None:
    policy = make_policy(dtype="bfloat16")
    train(policy, range(2))
    store = CheckpointStore(tmp_path / "checkpoints", model_folder=tied_folder)
    save(store, 2, policy, {})
    export(find(tmp_path), tmp_path / "out", "float32")
    exact, rounded = load_file(tmp_path / "out/model.safetensors"), weights(policy)
    assert equal({name: tensor.bfloat16() for name, tensor in exact.items()}, rounded)
    assert any(not torch.equal(tensor, rounded[name].float()) for name, tensor in exact.items())


def test_what_cannot_be_exported_is_said(saved: tuple[Path, Any], tmp_path: Path) -> None:
    work, _ = saved
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        find(tmp_path / "base")
    with pytest.raises(FileExistsError, match="give a new folder"):
        export(find(work), work)
    tensors = find(work) / "state-00000.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        export(find(work), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(saved: tuple[Path, Any], tmp_path: Path) -> None:
    work, _ = saved
    done = CliRunner().invoke(app, ["export", str(work), str(tmp_path / "out"), "--dtype", "float16"])
    assert done.exit_code == 0, done.output
    assert "checkpoint-00000002-step-00000002" in done.output
    again = CliRunner().invoke(app, ["export", str(work), str(tmp_path / "out")])
    assert again.exit_code == 2
    assert "give a new folder" in again.output
