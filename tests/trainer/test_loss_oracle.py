"""Every number of the archive: 143 losses with gradients, KL estimators, distillation, within 1e-9 in float64.

Each case runs through the run file's own options and `policy_loss`, so the path from the run file to the gradient is what is
checked. Two rules of the archive are not Slipstream's in production and are set up here: a divisor other than the number of
tokens, and a token with a NaN from the engine that still counts (in production its mask is unset: test_batches.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms import policy_loss
from services.trainer.algorithms.corrections import correction_weights
from services.trainer.algorithms.distill import divergence
from services.trainer.algorithms.kl import estimate
from services.trainer.algorithms.reductions import Tokens
from shared.algorithms import (
    CispoConfig,
    CorrectionConfig,
    GrpoConfig,
    GspoConfig,
    KlConfig,
    PolicyOptions,
    SapoConfig,
    VespoConfig,
)
from tests.trainer.oracle import ARCHIVE, CASES, array, stored, tokens_of

TOLERANCE = 1e-9
REDUCTIONS = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
    "luspo": "sequence_sum",
    "dr_grpo": "constant",
}
GIVEN_DIVISOR = ("dapo", "cispo", "vespo")


def correction_of(case: dict[str, Any]) -> CorrectionConfig:
    return CorrectionConfig(
        mode=case.get("is_mode", "none"),
        low=case.get("is_min") or 0.0,
        high=case.get("is_max", 2.0),
        opsm=case.get("opsm"),
    )


def options_of(case: dict[str, Any]) -> PolicyOptions:
    kind, level = case["loss_type"], case["level"]
    shared: dict[str, Any] = {
        "reduction": REDUCTIONS[kind],
        "max_tokens": case["max_len"],
        "old_logprobs": "trainer",
        "correction": correction_of(case),
        "kl": KlConfig(coef=case.get("beta", 0.0), unbiased=case.get("kl_is", False)),
    }
    clip = {"clip_low": case["eps_low"], "clip_high": case["eps_high"]}
    if kind == "sapo":
        return SapoConfig(tau_pos=case.get("tau_pos", 1.0), tau_neg=case.get("tau_neg", 1.05), level=level, **shared)
    if kind == "cispo":
        return CispoConfig(cap=case["eps_high"], **shared)
    if kind == "vespo":
        return VespoConfig(**{**shared, "old_logprobs": "rollout", "correction": CorrectionConfig()})
    if level == "sequence":
        return GspoConfig(**clip, **shared)
    return GrpoConfig(**clip, delta=case.get("delta"), **shared)


def with_weights_in_the_ratio(case: dict[str, Any], tokens: Tokens, mask_BT: torch.Tensor) -> Tokens:
    """VESPO puts the correction into the sequence's ratio: policy / old * w is policy / rollout."""
    weights = array(case, "is_ratio")
    rollout_N = tokens.old_logprobs_N if weights is None else tokens.old_logprobs_N - weights[mask_BT].log()  # type: ignore[operator]
    return replace(tokens, rollout_logprobs_N=rollout_N)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_loss_and_gradient(case: dict[str, Any]) -> None:
    tokens, logprobs_BT, mask_BT = tokens_of(case)
    if case["loss_type"] == "vespo":
        tokens = with_weights_in_the_ratio(case, tokens, mask_BT)
    total, metrics = policy_loss(options_of(case))(tokens)
    divisor = case["num_items"] if case["loss_type"] in GIVEN_DIVISOR else float(metrics["denominator"])
    loss = total / max(divisor, 1.0)
    loss.backward()
    assert logprobs_BT.grad is not None
    expected_loss, expected_gradient = ARCHIVE[f"{case['key']}/loss"], ARCHIVE[f"{case['key']}/grad"]
    np.testing.assert_allclose(loss.item(), expected_loss, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(logprobs_BT.grad.numpy(), expected_gradient, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", [c for c in CASES if "is_mode" in c], ids=lambda case: case["name"])
def test_correction_weights(case: dict[str, Any]) -> None:
    tokens, _, mask_BT = tokens_of(case)
    expected = array(case, "is_ratio")
    assert expected is not None
    assert tokens.old_logprobs_N is not None
    weights_N = correction_weights(tokens, tokens.old_logprobs_N, correction_of({**case, "opsm": None}))
    np.testing.assert_allclose(weights_N, expected.expand(mask_BT.shape)[mask_BT], rtol=0, atol=TOLERANCE)


def test_the_archive_is_whole() -> None:
    assert len(CASES) == 143
    assert {case["loss_type"] for case in CASES} == set(REDUCTIONS)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_kl_estimators(name: str) -> None:
    logprobs = stored("kl/logp").requires_grad_()
    values = estimate(logprobs - stored("kl/ref"), name)
    values.sum().backward()
    assert logprobs.grad is not None
    np.testing.assert_allclose(values.detach(), ARCHIVE[f"kl/{name}/value"], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(logprobs.grad, ARCHIVE[f"kl/{name}/dlogp"], rtol=0, atol=TOLERANCE)


DIVERGENCES = {
    "fkl": ("forward_kl", 0.5, 1.0),
    "rkl": ("reverse_kl", 0.5, 1.0),
    "jsd0.5": ("jsd", 0.5, 1.0),
    "jsd0.1": ("jsd", 0.1, 1.0),
    "fkl_T2": ("forward_kl", 0.5, 2.0),
    "rkl_T2": ("reverse_kl", 0.5, 2.0),
}


@pytest.mark.parametrize("name", list(DIVERGENCES))
def test_divergences_over_the_vocabulary(name: str) -> None:
    student = stored("distill/student_logits").requires_grad_()
    mask = stored("distill/mask").bool()
    per_token = divergence(student, stored("distill/teacher_logits"), *DIVERGENCES[name])
    loss = per_token[mask].mean()
    loss.backward()
    assert student.grad is not None
    for ours, theirs in (
        (per_token.detach()[mask], stored(f"distill/{name}/per_token")[mask]),
        (loss.detach(), stored(f"distill/{name}/loss")),
        (student.grad, stored(f"distill/{name}/grad_student_logits")),
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
