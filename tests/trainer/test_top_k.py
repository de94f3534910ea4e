"""The policy scores the teacher's likeliest ids beside the sampled ones, in one pass, with gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms import policy_loss
from services.trainer.batches import pack
from services.trainer.megatron import scoring
from shared.algorithms import OpdConfig, RlooConfig
from tests.trainer.conftest import VOCABULARY, samples
from tests.trainer.policies import gradients

K = 3


def batch_with_a_teacher(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)

    def taught(sample: Any) -> Any:
        size = len(sample.mask)
        logprobs = np.log(rng.dirichlet(np.ones(K + 1), size))[:, :K].astype(np.float32)
        ids = np.stack([rng.permutation(VOCABULARY)[:K] for _ in range(size)]).astype(np.int32).reshape(size, K)
        return replace(sample, extras={"teacher_top_ids": ids, "teacher_top_logprobs": logprobs})

    (batch,) = pack([taught(sample) for sample in samples(6, seed=seed)], 1000)
    return batch


@pytest.mark.parametrize("elements", [1 << 24, 5 * VOCABULARY])
def test_other_ids_are_scored_as_if_they_had_been_sampled(
    make_policy: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    monkeypatch.setattr(scoring, "LOGIT_ELEMENTS", elements)
    policy, batch = make_policy(), batch_with_a_teacher()
    found: list[Any] = []

    def loss(tokens: Any) -> Any:
        found.append(tokens)
        return policy_loss(OpdConfig(distill={"form": "top_k"}))(tokens)  # type: ignore[arg-type]

    sums = policy.forward_backward(batch, loss, temperature=0.7)
    assert sums["loss"] > 0
    assert any(gradient.abs().max() > 0 for gradient in gradients(policy).values())
    for column in range(K):
        alone = replace(batch, targets_N=batch.extras["teacher_top_ids"][:, column].astype(np.int64), extras={})
        expected, _ = policy.logprobs(alone, 0.7)
        torch.testing.assert_close(found[0].extras["student_top_logprobs"][:, column].detach(), expected)


def test_learning_from_the_top_k_brings_the_policy_to_the_teacher(make_policy: Callable[..., Any]) -> None:
    policy, batch = make_policy(), batch_with_a_teacher()
    loss = policy_loss(OpdConfig(distill={"form": "top_k", "divergence": "forward_kl"}))  # type: ignore[arg-type]
    losses = []
    for _ in range(20):
        sums = policy.forward_backward(batch, loss)
        losses.append(sums["loss"] / sums["denominator"])
        policy.update(sums["denominator"], 3e-3)
    assert losses[-1] < 0.7 * losses[0]


def test_a_first_look_sees_what_the_loss_will_see(make_policy: Callable[..., Any]) -> None:
    policy = make_policy()
    (batch,) = pack(samples(6), 1000)
    (seen,) = policy.observe(batch, 0.9)
    assert not seen.logprobs_N.requires_grad
    trained: list[Any] = []
    policy.forward_backward(batch, lambda tokens: (trained.append(tokens), policy_loss(RlooConfig())(tokens))[1], 0.9)
    torch.testing.assert_close(seen.logprobs_N, trained[0].logprobs_N.detach())
