"""Every family computes what transformers computes, and goes to Hugging Face and back to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.layouts.measure import all_logprobs, transformers_logprobs
from tests.trainer.models import build_model

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-tied": {"tied": True},
    "qwen3_moe": {},
    "qwen3_moe-some_dense_layers": {"mlp_only_layers": [1, 2], "norm_topk_prob": False},
    "qwen2": {},
    "qwen2-tied": {"tied": True},
    "llama": {},
    "llama-tied": {"tied": True},
    "llama-3": {"rope_parameters": LLAMA_3},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    return build_model(tmp_path_factory.mktemp(name) / "model", name.partition("-")[0], **MODELS[name])


def test_logits_are_those_of_transformers(folder: Path, make_policy: Callable[..., Any]) -> None:
    ours_NV = all_logprobs(make_policy(folder, micro_batch_tokens=1000))
    torch.testing.assert_close(ours_NV, transformers_logprobs(folder), rtol=0, atol=1e-5)


def test_there_and_back_to_the_bit(folder: Path, make_policy: Callable[..., Any], tmp_path: Path) -> None:
    make_policy(folder).save_hf(tmp_path)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_gradients_are_those_of_transformers(folder: Path, make_policy: Callable[..., Any]) -> None:
    from transformers import AutoModelForCausalLM

    from services.trainer.algorithms.sft import sft
    from services.trainer.batches import TrainSample, pack
    from tests.trainer.conftest import samples

    chosen: list[TrainSample] = samples(6, seed=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    total = torch.zeros(())
    for sample in chosen:
        ids = torch.from_numpy(sample.ids.astype("int64"))
        logprobs = model(ids[None]).logits[0].log_softmax(-1)[sample.prompt_len - 1 : -1]
        picked = logprobs.gather(1, ids[sample.prompt_len :, None])[:, 0]
        total = total - picked[torch.from_numpy(sample.mask != 0)].sum()
    total.backward()
    policy = make_policy(folder)
    policy.forward_backward(pack(chosen, 1000), sft)
    from transformers.core_model_loading import revert_weight_conversion

    theirs = revert_weight_conversion(model, {name: p.grad for name, p in model.named_parameters()})
    found = dict(policy.gradients())
    assert found.keys() <= theirs.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=5e-5, msg=name)


def test_a_critic_starts_at_zero_and_learns_values(make_policy: Callable[..., Any], tied_folder: Path) -> None:
    from functools import partial

    import numpy as np

    from services.trainer.algorithms.ppo import critic
    from services.trainer.batches import TrainSample, pack
    from services.trainer.megatron.policy import Policy
    from shared.sections import TrainerConfig
    from tests.trainer.conftest import samples

    policy = Policy.create(tied_folder, TrainerConfig(), role="critic")

    def with_returns(sample: TrainSample) -> TrainSample:
        size = len(sample.mask)
        columns = {"returns": np.full(size, 0.7, np.float32), "values": np.zeros(size, np.float32)}
        return TrainSample(
            sample.group_id, sample.ids, sample.prompt_len, sample.mask, sample.logprobs, sample.advantage, columns
        )

    (batch,) = pack([with_returns(sample) for sample in samples(8)], 1000)
    assert policy.logprobs(batch)[0].abs().max() == 0
    for _ in range(60):
        sums = policy.forward_backward(batch, partial(critic, value_clip=None))
        policy.update(sums["denominator"], 3e-3)
    values_N = policy.logprobs(batch)[0]
    assert (values_N - 0.7).abs().mean() < 0.1
    names = [name for name, _ in policy.hf_tensors()]
    assert "value_head.weight" in names
    assert "lm_head.weight" not in names


def test_a_reference_only_scores(make_policy: Callable[..., Any], tied_folder: Path) -> None:
    from services.trainer.batches import pack
    from services.trainer.megatron.policy import Policy
    from shared.sections import TrainerConfig
    from tests.trainer.conftest import samples

    reference = Policy.create(tied_folder, TrainerConfig(), role="reference")
    (batch,) = pack(samples(4), 1000)
    torch.testing.assert_close(reference.logprobs(batch)[0], make_policy().logprobs(batch)[0])
    with pytest.raises(RuntimeError, match="a reference has no optimiser"):
        reference.update(1.0, 1e-3)
