"""A pretrained model: SmolLM2-135M-Instruct through the trainer gives transformers' numbers, and learns. `make test-large`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.trainer.batches import TrainSample, pack

pytestmark = pytest.mark.large

CONVERT = Path(__file__).parents[2] / "examples/smollm2/convert.py"
TEXT = "The capital of France is Paris. The capital of Italy is Rome, and the capital of Spain is Madrid."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted model; SMOLLM2 names a folder that has it already."""
    if "SMOLLM2" in os.environ:
        return Path(os.environ["SMOLLM2"])
    target = tmp_path_factory.mktemp("smollm2") / "model"
    subprocess.run([sys.executable, str(CONVERT), str(target)], check=True, timeout=900)
    return target


@pytest.fixture(scope="module")
def sample(folder: Path) -> TrainSample:
    from transformers import AutoTokenizer

    ids = np.array(AutoTokenizer.from_pretrained(folder).encode(TEXT), dtype=np.int64)
    size = len(ids) - 1
    return TrainSample("0-0", ids, 1, np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.float32), 0.0)


def test_log_probabilities_are_those_of_transformers(
    folder: Path, sample: TrainSample, make_policy: Callable[..., Any]
) -> None:
    from transformers import AutoModelForCausalLM

    ids = torch.from_numpy(sample.ids)
    with torch.no_grad():
        expected_NV = AutoModelForCausalLM.from_pretrained(folder)(ids[None]).logits[0, :-1].log_softmax(-1)
    (scores,) = make_policy(folder).score(pack([sample], 100), top=20)
    # Logits reach 30 here, so that 2e-5 is what float32 leaves of 1e-5.
    torch.testing.assert_close(scores.logprobs_N, expected_NV.gather(1, ids[1:, None])[:, 0], rtol=0, atol=2e-5)
    torch.testing.assert_close(scores.top_logprobs_NK, expected_NV.gather(1, scores.top_ids_NK), rtol=1e-5, atol=2e-5)
    assert scores.logprobs_N.mean() > -2, "a trained model finds this text likely"


def test_there_and_back_to_the_bit(folder: Path, make_policy: Callable[..., Any], tmp_path: Path) -> None:
    make_policy(folder).save_hf(tmp_path)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_it_learns(folder: Path, sample: TrainSample, make_policy: Callable[..., Any]) -> None:
    from services.trainer.algorithms.sft import sft

    policy, losses = make_policy(folder), []
    for _ in range(4):
        sums = policy.forward_backward(pack([sample], 100), sft)
        losses.append(sums["loss"] / sums["denominator"])
        policy.update(sums["denominator"], 1e-5)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
