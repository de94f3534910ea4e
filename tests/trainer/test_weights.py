"""Hugging Face -> Megatron -> Hugging Face is exact to the bit, sharded or not, tied or not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.trainer.model_folder import ModelFolderError


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(params=["tied_folder", "untied_folder"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_round_trip_is_exact(folder: Path, make_policy: Callable[..., Any], tmp_path: Path) -> None:
    folder = shutil.copytree(folder, tmp_path / "in")
    (folder / "tokenizer.json").write_text("{}")
    policy = make_policy(folder)
    assert same(dict(policy.hf_tensors()), stored(folder))
    digests = policy.save_hf(tmp_path / "out")
    assert same(stored(tmp_path / "out"), stored(folder))
    assert list(digests) == ["model.safetensors"]
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"


def test_transformers_reads_what_was_saved(
    make_policy: Callable[..., Any], untied_folder: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    make_policy(untied_folder).save_hf(tmp_path)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits
        theirs = AutoModelForCausalLM.from_pretrained(untied_folder)(ids).logits
    assert torch.equal(ours, theirs)


def test_sharded_folders_both_ways(make_policy: Callable[..., Any], untied_folder: Path, tmp_path: Path) -> None:
    from services.trainer.hf_folder import save_hf

    policy = make_policy(untied_folder)
    digests = save_hf(
        policy.hf_specs(), policy.hf_tensors(), untied_folder, tmp_path / "sharded", max_shard_bytes=20_000
    )
    index = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())
    assert len(digests) > 2
    assert set(index["weight_map"].values()) == set(digests)
    assert same(stored(tmp_path / "sharded"), stored(untied_folder))
    assert same(dict(make_policy(tmp_path / "sharded").hf_tensors()), stored(untied_folder))

    (tmp_path / "sharded" / sorted(digests)[1]).unlink()
    with pytest.raises(ModelFolderError, match=r"listed in model\.safetensors\.index\.json but not there"):
        make_policy(tmp_path / "sharded")


def test_bfloat16_weights_are_cast_and_config_says_what_was_written(
    make_policy: Callable[..., Any], tied_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tied_folder, tmp_path / "half")
    halves = {name: tensor.bfloat16() for name, tensor in stored(tied_folder).items()}
    save_file(halves, tmp_path / "half/model.safetensors", metadata={"format": "pt"})
    policy = make_policy(tmp_path / "half", dtype="bfloat16")
    assert same(dict(policy.hf_tensors()), halves)
    make_policy(tmp_path / "half").save_hf(tmp_path / "single")
    assert same(stored(tmp_path / "single"), {name: tensor.float() for name, tensor in halves.items()})
    assert json.loads((tmp_path / "single/config.json").read_text())["dtype"] == "float32"


def test_incomplete_or_mismatched_weights_are_named(
    make_policy: Callable[..., Any], tied_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(tied_folder, tmp_path / "m")
    weights = tmp_path / "m/model.safetensors"
    tensors = stored(tied_folder)

    save_file({k: v for k, v in tensors.items() if k != "model.layers.1.mlp.up_proj.weight"}, weights)
    with pytest.raises(ModelFolderError, match=r"model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        make_policy(tmp_path / "m")

    save_file({**tensors, "model.norm.weight": torch.zeros(5)}, weights)
    with pytest.raises(ModelFolderError, match=r"model\.norm\.weight has shape \(5,\).*do not belong together"):
        make_policy(tmp_path / "m")

    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelFolderError, match="not a readable safetensors file"):
        make_policy(tmp_path / "m")

    weights.unlink()
    with pytest.raises(ModelFolderError, match=r"no \*\.safetensors file"):
        make_policy(tmp_path / "m")
