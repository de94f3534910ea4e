"""The Megatron model computes what transformers computes, packed or not, and refuses options that it cannot honour."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms.reductions import Tokens
from services.trainer.algorithms.sft import sft
from services.trainer.batches import TrainSample, pack
from tests.trainer.conftest import samples
from tests.trainer.policies import gradients, restore, state


def hf_logprobs(model: Any, sample: TrainSample, temperature: float = 1.0) -> torch.Tensor:
    """transformers' log-probabilities of the sample's trained tokens."""
    ids = torch.from_numpy(sample.ids.astype(np.int64))
    logprobs_LV = (model(ids[None]).logits[0] / temperature).log_softmax(-1)
    logprobs_C = logprobs_LV[sample.prompt_len - 1 : -1].gather(1, ids[sample.prompt_len :, None]).squeeze(1)
    return logprobs_C[torch.from_numpy(sample.mask != 0)]


@pytest.fixture(params=["tied_folder", "untied_folder"])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_logprobs_and_gradients_match_transformers(folder: Path, make_policy: Callable[..., Any]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    policy = make_policy(folder)
    chosen = sorted(samples(8), key=lambda sample: len(sample.ids))
    (batch,) = pack(chosen, 1000)
    theirs_N = torch.cat([hf_logprobs(model, sample) for sample in chosen])
    ours_N, entropy_N = policy.logprobs(batch)
    torch.testing.assert_close(ours_N, theirs_N.detach(), rtol=0, atol=5e-6)
    assert ((entropy_N > 0) & (entropy_N < np.log(97))).all()

    (-theirs_N.sum()).backward()
    policy.forward_backward(batch, sft)
    for name, gradient in gradients(policy).items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=2e-5)
    policy.discard()


def test_packing_changes_nothing(make_policy: Callable[..., Any]) -> None:
    policy = make_policy()
    chosen = samples(20, seed=3)
    (together,) = pack(chosen, 1000)
    ours_N, _ = policy.logprobs(together)
    alone = [
        policy.logprobs(batch)[0]
        for sample in sorted(chosen, key=lambda s: len(s.ids))
        for batch in pack([sample], 1000)
    ]
    torch.testing.assert_close(ours_N, torch.cat(alone), rtol=0, atol=5e-6)


def test_no_token_sees_another_sequence_or_the_future(make_policy: Callable[..., Any]) -> None:
    policy = make_policy()
    left, right = (sample for sample in samples(2, seed=5, prompt=(4, 5), completion=(6, 7)))
    before, _ = policy.logprobs(pack([left, right], 100)[0])
    changed = right.ids.copy()
    changed[-1] = (changed[-1] + 1) % 96
    right = TrainSample(right.group_id, changed, right.prompt_len, right.mask, right.logprobs, right.advantage)
    after, _ = policy.logprobs(pack([left, right], 100)[0])
    assert torch.equal(before[:-1], after[:-1])


def test_temperature_divides_the_logits(make_policy: Callable[..., Any], tied_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    (sample,) = samples(1, completion=(8, 9))
    theirs = hf_logprobs(AutoModelForCausalLM.from_pretrained(tied_folder), sample, temperature=0.6)
    ours, _ = make_policy().logprobs(pack([sample], 100)[0], temperature=0.6)
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=5e-6)


def test_recomputing_activations_changes_no_gradient(make_policy: Callable[..., Any]) -> None:
    (batch,) = pack(samples(8), 1000)
    found = []
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for options in ({}, recompute):
        policy = make_policy(megatron=options)
        policy.forward_backward(batch, sft)
        found.append(gradients(policy))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_bfloat16_trains_with_float32_copies(make_policy: Callable[..., Any], tmp_path: Path) -> None:
    policy = make_policy(dtype="bfloat16")
    (batch,) = pack(samples(8), 1000)
    losses = []
    for _ in range(8):
        sums = policy.forward_backward(batch, sft)
        losses.append(sums["loss"] / sums["denominator"])
        policy.update(sums["denominator"], 1e-2)
    assert losses[-1] < 0.7 * losses[0]
    saved = state(policy)
    assert saved["master/model.norm.weight"].dtype is torch.float32

    other = make_policy(dtype="bfloat16", seed=1)
    restore(other, saved, tmp_path)
    for each in (policy, other):
        each.update(each.forward_backward(batch, sft)["denominator"], 1e-2)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(policy.hf_tensors(), other.hf_tensors(), strict=True))


def test_a_loss_sees_every_column(make_policy: Callable[..., Any]) -> None:
    seen: list[Tokens] = []

    def spy(tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        seen.append(tokens)
        return sft(tokens)

    plain = samples(3)
    extra = [
        TrainSample(s.group_id, s.ids, s.prompt_len, s.mask, s.logprobs, s.advantage, {"reference": s.logprobs * 2})
        for s in plain
    ]
    make_policy().forward_backward(pack(extra, 100)[0], spy)
    torch.testing.assert_close(seen[0].extras["reference"], seen[0].rollout_logprobs_N * 2)
    assert seen[0].sequences == 3
    assert not seen[0].rollout_logprobs_N.requires_grad


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_layers": 3}, r"trainer\.megatron\.num_layers: is decided by the model folder's config\.json; remove it"),
        ({"overlap_grad_reduce": True}, "reduced once an update"),
        ({"calculate_per_token_loss": False}, "is always on"),
        ({"bf16": True}, r"set by model\.dtype"),
        ({"recompute_granularty": "full"}, "did you mean 'recompute_granularity'"),
        ({"recompute_granularity": "full"}, "Megatron refuses this combination"),
    ],
)
def test_native_options_that_cannot_be_used_are_explained(
    make_policy: Callable[..., Any], options: dict[str, Any], text: str
) -> None:
    from services.trainer.megatron.options import NativeOptionError

    with pytest.raises(NativeOptionError, match=text):
        make_policy(megatron=options)


def test_native_options_reach_megatron(make_policy: Callable[..., Any]) -> None:
    policy = make_policy(megatron={"attention_softmax_in_fp32": False, "check_for_nan_in_grad": True})
    assert policy.chunks[0].config.attention_softmax_in_fp32 is False
    assert policy._models[0].ddp_config.check_for_nan_in_grad is True


def test_compatibility_parts_can_be_chosen_and_are_checked() -> None:
    from services.trainer.megatron.compat import CompatError, install

    with pytest.raises(CompatError, match=r"unknown part 'jot'; known are jit, device, literal, rng, experts, uneven"):
        install("jot")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is compiled")
def test_nothing_is_compiled_so_that_no_c_compiler_is_needed(make_policy: Callable[..., Any]) -> None:
    """Neither what megatron wrapped at its import nor what it wraps in modules that are imported later."""
    make_policy()
    compiled = [
        f"{name}.{attribute}"
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.core")
        for attribute, value in list(vars(module).items())
        if isinstance(value, FunctionType) and "_torchdynamo_orig_callable" in vars(value)
    ]
    assert compiled == []
    assert sys.modules["megatron.core.jit"].jit_fuser(len) is len
    assert torch.compile.__module__ == "torch"


def test_compatibility_is_needed_and_can_be_switched_off(tied_folder: Path) -> None:
    """Without it megatron fails on a machine without CUDA: the day it does not, the module can go."""
    code = (
        "import sys; from services.trainer.megatron.policy import Policy; from shared.sections import TrainerConfig; "
        "Policy.create(sys.argv[1], TrainerConfig())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tied_folder)],
        env={"SLIPSTREAM_MEGATRON_COMPAT": "off", "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert torch.cuda.is_available() or "CUDA" in done.stderr
