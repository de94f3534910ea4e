"""Updates: independent of how the batch was cut, repeatable to the bit, resumable to the bit, safe against bad numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms.reductions import merge
from services.trainer.algorithms.sft import sft
from services.trainer.batches import PackedBatch, TrainSample, pack
from shared.sections import OptimizerConfig
from tests.trainer.conftest import samples
from tests.trainer.policies import equal, gradients, grpo, restore, state, train, weights


def with_advantage(sample: TrainSample, advantage: float) -> TrainSample:
    return TrainSample(sample.group_id, sample.ids, sample.prompt_len, sample.mask, sample.logprobs, advantage)


def test_the_split_into_micro_batches_changes_rounding_only(make_policy: Callable[..., Any]) -> None:
    found = []
    for budget in (1000, 60, 20):
        policy = make_policy()
        batches = pack(samples(16), budget)
        sums = merge(policy.forward_backward(batch, grpo) for batch in batches)
        found.append((len(batches), sums, gradients(policy)))
        policy.discard()
    assert [count for count, _, _ in found] == sorted({count for count, _, _ in found})
    for _, sums, gradient in found[1:]:
        assert sums == pytest.approx(found[0][1], rel=1e-5)
        for name, whole in found[0][2].items():
            torch.testing.assert_close(gradient[name], whole, rtol=1e-4, atol=1e-5)


def test_an_update_is_what_torch_does_with_the_mean_loss(make_policy: Callable[..., Any]) -> None:
    """Normalisation, clipping, weight decay and AdamW against torch's own on the same gradients."""
    options = OptimizerConfig(betas=(0.8, 0.97), eps=1e-7, weight_decay=0.3, clip_grad=0.5)
    policy = make_policy(optimizer=options)
    theirs = {name: tensor.detach().clone().requires_grad_() for name, tensor in policy.chunks[0].named_parameters()}
    matrices = [tensor for tensor in theirs.values() if tensor.dim() > 1]
    vectors = [tensor for tensor in theirs.values() if tensor.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], betas=(0.8, 0.97), eps=1e-7, weight_decay=0.3
    )
    for step in range(3):
        sums = merge(policy.forward_backward(batch, grpo) for batch in pack(samples(8, seed=step), 60))
        for name, parameter in policy.chunks[0].named_parameters():
            theirs[name].grad = parameter.main_grad / sums["denominator"]
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.5)
        rate = 0.01 * (step + 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        outcome = policy.update(sums["denominator"], rate)
        assert outcome["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        assert outcome["updated"] == 1.0
    for name, parameter in policy.chunks[0].named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-6)


def test_same_seed_and_input_give_the_same_bits(make_policy: Callable[..., Any]) -> None:
    first, second = make_policy(), make_policy()
    assert train(first, range(4), budget=60) == train(second, range(4), budget=60)
    assert equal(weights(first), weights(second))


def test_a_restored_state_goes_on_bit_for_bit(make_policy: Callable[..., Any], tmp_path: Path) -> None:
    straight = make_policy()
    train(straight, range(6))
    stopped = make_policy()
    train(stopped, range(3))
    saved = state(stopped)
    resumed = make_policy(seed=7)
    train(resumed, range(10, 12))
    restore(resumed, saved, tmp_path)
    assert equal(state(resumed), saved)
    train(resumed, range(3, 6))
    assert equal(weights(resumed), weights(straight))


def test_a_state_before_the_first_update_clears_the_moments(make_policy: Callable[..., Any], tmp_path: Path) -> None:
    fresh = make_policy()
    saved = state(fresh)
    used = make_policy()
    train(used, range(2))
    restore(used, saved, tmp_path)
    train(used, range(3))
    train(fresh, range(3))
    assert equal(weights(used), weights(fresh))


def test_a_state_of_another_model_is_refused_and_changes_nothing(
    make_policy: Callable[..., Any], untied_folder: Any, tmp_path: Path
) -> None:
    from services.trainer.megatron.policy import StateMismatch

    policy, other = make_policy(), make_policy(untied_folder)
    train(policy, range(1))
    before = state(policy)
    with pytest.raises(StateMismatch, match=r"'lm_head\.weight' is only in one of them"):
        restore(policy, state(other), tmp_path)
    with pytest.raises(StateMismatch, match=r"model\.norm\.weight: saved with shape \(3,\), the model has \(32,\)"):
        restore(policy, {**before, "weights/model.norm.weight": torch.zeros(3)}, tmp_path)
    assert equal(state(policy), before)


def test_a_batch_without_signal_changes_nothing(make_policy: Callable[..., Any]) -> None:
    policy = make_policy()
    train(policy, range(2))
    before = state(policy)
    (batch,) = pack([with_advantage(sample, 0.0) for sample in samples(8)], 1000)
    sums = policy.forward_backward(batch, grpo)
    assert sums["tokens"] > 0
    assert policy.update(sums["denominator"], 1e-2) == {"grad_norm": 0.0, "updated": 0.0, "lr": 1e-2}
    assert policy.update(0.0, 1e-2)["updated"] == 0.0
    assert equal(state(policy), before)


def test_tokens_without_a_finite_rollout_logprob_leave_the_update(make_policy: Callable[..., Any]) -> None:
    """NaN from the engine for some tokens is the same as the environment having written them."""

    def spoil(sample: TrainSample, *, masked: bool) -> TrainSample:
        odd = np.arange(len(sample.mask)) % 2 == 1
        return TrainSample(
            sample.group_id,
            sample.ids,
            sample.prompt_len,
            np.where(odd, 0, sample.mask) if masked else sample.mask,
            sample.logprobs if masked else np.where(odd, np.float32(np.nan), sample.logprobs),
            sample.advantage,
        )

    found = []
    for masked in (True, False):
        policy = make_policy()
        (batch,) = pack([spoil(sample, masked=masked) for sample in samples(8)], 1000)
        found.append((policy.forward_backward(batch, grpo), gradients(policy)))
        policy.discard()
    assert found[1][0]["nonfinite_logprobs"] > 0
    assert {**found[1][0], "nonfinite_logprobs": 0.0} == pytest.approx(found[0][0])
    assert all(torch.allclose(found[0][1][name], found[1][1][name], atol=1e-6) for name in found[0][1])


def test_a_loss_that_is_not_finite_is_an_error_that_names_the_groups(make_policy: Callable[..., Any]) -> None:
    from services.trainer.megatron.policy import NonFiniteError

    policy = make_policy()
    before = weights(policy)
    chosen = samples(8)
    (batch,) = pack([with_advantage(chosen[0], float("nan")), *chosen[1:]], 1000)
    with pytest.raises(NonFiniteError, match=r"groups 0-0, 0-1|groups 0-1, 0-0"):
        policy.forward_backward(batch, grpo)
    policy.discard()
    assert equal(weights(policy), before)
    assert train(policy, range(2)) == train(make_policy(), range(2))


def test_a_gradient_that_is_not_finite_is_an_error_before_any_weight_changes(make_policy: Callable[..., Any]) -> None:
    from services.trainer.megatron.policy import NonFiniteError

    def explode(tokens: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = sft(tokens)
        return (loss - loss.detach()).abs().sqrt(), metrics  # 0, with an infinite slope

    policy = make_policy()
    before = weights(policy)
    policy.forward_backward(pack(samples(4), 1000)[0], explode)
    with pytest.raises(NonFiniteError, match="no weight was changed"):
        policy.update(1.0, 1e-2)
    assert equal(weights(policy), before)


def test_reset_forgets_the_moments(make_policy: Callable[..., Any]) -> None:
    policy = make_policy()
    train(policy, range(2))
    assert any(name.startswith("exp_avg/") for name in state(policy))
    policy.reset_optimizer(OptimizerConfig(lr=1e-3))
    assert not any(name.startswith("exp_avg/") for name in state(policy))


def test_loaded_weights_are_those_of_the_folder(make_policy: Callable[..., Any], tied_folder: Any) -> None:
    policy = make_policy()
    before = weights(policy)
    train(policy, range(2))
    policy.load_hf(tied_folder)
    assert equal(weights(policy), before)


def test_an_empty_micro_batch_is_harmless(make_policy: Callable[..., Any]) -> None:
    policy = make_policy()
    silent = [
        TrainSample(s.group_id, s.ids, s.prompt_len, np.zeros_like(s.mask), s.logprobs, s.advantage) for s in samples(3)
    ]
    batch: PackedBatch = pack(silent, 1000)[0]
    assert policy.forward_backward(batch, grpo)["denominator"] == 0
    assert policy.update(0.0, 1e-2)["updated"] == 0.0
