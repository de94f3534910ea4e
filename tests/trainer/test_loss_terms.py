"""Losses without a case in the archive: against numpy, from the run file's options on, gradients by central differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.algorithms import TERMS, first_pass, needs_first_pass, policy_loss
from services.trainer.algorithms.distill import top_k_divergence
from services.trainer.algorithms.dpo import dpo
from services.trainer.algorithms.m2po import m2po_radius
from services.trainer.algorithms.ppo import critic
from services.trainer.algorithms.reductions import MissingColumn, Tokens
from shared.algorithms import BY_NAME, PolicyOptions
from tests.trainer import numeric
from tests.trainer.numeric import Example, central_differences, example, reduced

KL = {"coef": 0.3, "use": "loss"}
NONE = {"mode": "none"}
CASES: dict[str, tuple[dict[str, Any], numeric.TokenLoss]] = {
    "dual clip": (
        {
            "name": "grpo",
            "clip_low": 0.1,
            "clip_high": 0.15,
            "dual_clip": 1.3,
            "old_logprobs": "rollout",
            "correction": NONE,
        },
        numeric.dual_clip,
    ),
    "reinforce++": ({"name": "reinforce_pp"}, numeric.reinforce_pp),
    "reinforce++ baseline": ({"name": "reinforce_pp_baseline"}, numeric.reinforce_pp),
    "ppo": ({"name": "ppo"}, numeric.reinforce_pp),
    "rloo": ({"name": "rloo", "correction": {"high": 1.2}}, numeric.rloo),
    "opd": ({"name": "opd", "distill": {"coef": 0.7, "reward_weight": 0.5}}, numeric.opd),
    "decoupled": ({"name": "decoupled_ppo", "correction": {"high": 1.1}}, numeric.decoupled),
    "cispo with a floor": ({"name": "cispo", "cap": 1.5, "floor": 0.8}, numeric.cispo_floor),
    "gspo, token form": (
        {"name": "gspo", "form": "token", "clip_low": 0.05, "clip_high": 0.06},
        numeric.gspo_token,
    ),
    "dppo": ({"name": "dppo", "mask_high": 0.05, "mask_low": 0.04, "penalty": 0.3}, numeric.dppo),
    "ipo": ({"name": "dppo", "mask_high": 0.05, "mask_low": 0.05, "one_sided": False}, numeric.ipo),
    "m2po, clip": (
        {"name": "m2po", "rule": "clip", "budget": 0.01, "floor_low": 0.05, "floor_high": 0.08},
        numeric.m2po_clip,
    ),
    "masks of sequences": (
        {
            "name": "rloo",
            "correction": {"mode": "none", "geometric": [0.7, 1.3], "outlier": [0.4, 2.2], "opsm": 0.02},
        },
        numeric.whole_sequences,
    ),
    "unbiased k3": ({"name": "reinforce_pp", "kl": {**KL, "estimator": "k3", "unbiased": True}}, numeric.kl_unbiased),
    "low-variance KL": ({"name": "reinforce_pp", "kl": {**KL, "estimator": "low_var"}}, numeric.kl_low_var),
    "k2": ({"name": "reinforce_pp_baseline", "kl": KL}, numeric.kl_k2),
    "top-k divergence": (
        {
            "name": "opd",
            "distill": {"coef": 0.4, "reward_weight": 1.0, "form": "top_k", "divergence": "jsd", "beta": 0.3},
        },
        numeric.top_k,
    ),
}


def options_of(fields: dict[str, Any]) -> PolicyOptions:
    return BY_NAME[fields["name"]].model_validate(fields)


def loss_of(options: PolicyOptions, tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    constants = first_pass(options, [tokens]) if needs_first_pass(options) else {}
    return policy_loss(options, constants)(tokens)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("seed", [0, 1])
def test_value_and_gradient(name: str, reduction: str, seed: int) -> None:
    fields, expected_loss = CASES[name]
    case = example(seed=seed)
    options = options_of({**fields, "reduction": reduction, "max_tokens": 7})
    tokens = case.tokens()
    total, metrics = loss_of(options, tokens)
    total.backward()

    def numeric_total(logprobs: np.ndarray) -> float:
        return reduced(expected_loss(logprobs, case.logprobs, case), case, reduction, 7)[0]

    _, denominator = reduced(np.zeros_like(case.logprobs), case, reduction, 7)
    assert float(metrics["denominator"]) == denominator
    assert total.item() == pytest.approx(numeric_total(case.logprobs), rel=0, abs=1e-9)
    assert tokens.logprobs_N.grad is not None
    gradient = central_differences(numeric_total, case.logprobs)
    np.testing.assert_allclose(tokens.logprobs_N.grad, gradient, rtol=0, atol=2e-8)
    assert (tokens.logprobs_N.grad[~tokens.mask_N] == 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_m2po_leaves_out_the_largest_until_the_rest_keeps_the_budget(seed: int) -> None:
    """The value of a held-back token is that of the band's edge here and 0 in the paper; the gradient is the same."""
    case = example((7, 6, 8), seed=seed, distance=0.3)
    options = options_of({"name": "m2po"})
    tokens = case.tokens()
    total, _ = loss_of(options, tokens)
    total.backward()
    gradient = central_differences(
        lambda at: reduced(numeric.m2po_mask(at, case.logprobs, case), case, "token_mean", 1)[0], case.logprobs
    )
    assert tokens.logprobs_N.grad is not None
    np.testing.assert_allclose(tokens.logprobs_N.grad, gradient, rtol=0, atol=2e-8)


def test_m2po_within_its_budget_is_unbounded_and_needs_its_first_pass() -> None:
    case = example(distance=0.01)
    tokens = case.tokens()
    for rule in ("mask", "clip"):
        assert m2po_radius([(tokens, tokens.rollout_logprobs_N)], budget=0.04, rule=rule) == math.inf
    assert m2po_radius([], budget=0.04) == math.inf
    with pytest.raises(TypeError, match="radius"):
        policy_loss(options_of({"name": "m2po"}))(tokens)


@pytest.mark.parametrize("clip", [0.2, 0.5, None])
def test_the_critics_loss(clip: float | None) -> None:
    case = example()
    old, returns = case.extras["values"], case.extras["returns"]

    def losses(values: np.ndarray) -> np.ndarray:
        plain = (values - returns) ** 2
        if clip is None:
            return plain / 2
        return np.maximum(plain, (np.clip(values, old - clip, old + clip) - returns) ** 2) / 2

    tokens = case.tokens()  # the critic's output stands where a policy's log-probability does
    total, metrics = critic(tokens, value_clip=clip)
    total.backward()
    assert total.item() == pytest.approx(reduced(losses(case.logprobs), case, "token_mean", 1)[0], abs=1e-9)
    assert tokens.logprobs_N.grad is not None
    gradient = central_differences(lambda at: reduced(losses(at), case, "token_mean", 1)[0], case.logprobs)
    np.testing.assert_allclose(tokens.logprobs_N.grad, gradient, rtol=0, atol=2e-8)
    assert float(metrics["value_error"]) == pytest.approx(float(((case.logprobs - returns) ** 2)[case.mask].sum()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo(smoothing: float) -> None:
    case = example((3, 2, 4, 5), masked=0.0)
    pair, chosen = np.array([7, 7, 2, 2])[case.sequence], np.array([1.0, -1.0, -1.0, 1.0])[case.sequence]
    case.extras |= {"pair": pair, "chosen": chosen}
    reference = case.extras["reference_logprobs"]

    def total_of(logprobs: np.ndarray) -> float:
        total = 0.0
        for number in (7, 2):
            margin = 0.3 * ((logprobs - reference) * chosen)[pair == number].sum()
            sigmoid = 1 / (1 + np.exp(-margin))
            total -= (1 - smoothing) * np.log(sigmoid) + smoothing * np.log(1 - sigmoid)
        return float(total)

    tokens = case.tokens()
    total, metrics = dpo(tokens, beta=0.3, label_smoothing=smoothing)
    total.backward()
    assert float(metrics["denominator"]) == 2
    assert total.item() == pytest.approx(total_of(case.logprobs), abs=1e-9)
    assert tokens.logprobs_N.grad is not None
    np.testing.assert_allclose(tokens.logprobs_N.grad, central_differences(total_of, case.logprobs), rtol=0, atol=2e-8)


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_top_k_divergence(kind: str, tail: bool) -> None:
    case = example()
    student, teacher = case.extras["student_top_logprobs"], case.extras["teacher_top_logprobs"]
    tensor = torch.tensor(student, requires_grad=True)
    ours = top_k_divergence(tensor, torch.tensor(teacher), kind, 0.3, tail)
    ours.sum().backward()
    np.testing.assert_allclose(ours.detach(), numeric.divergence(student, teacher, kind, 0.3, tail), rtol=0, atol=1e-9)
    gradient = central_differences(lambda at: float(numeric.divergence(at, teacher, kind, 0.3, tail).sum()), student)
    np.testing.assert_allclose(tensor.grad, gradient, rtol=0, atol=1e-7)


def test_top_k_divergence_over_the_whole_vocabulary_is_finite() -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    whole = logits.log_softmax(-1)
    assert torch.isfinite(top_k_divergence(whole, whole.roll(1, -1), "reverse_kl")).all()
    assert top_k_divergence(whole, whole, "jsd").abs().max() < 1e-6


@pytest.mark.parametrize(
    ("fields", "column"),
    [
        ({"name": "grpo", "kl": {"coef": 0.1}}, "reference_logprobs"),
        ({"name": "opd"}, "teacher_logprobs"),
        ({"name": "decoupled_ppo"}, "age"),
        ({"name": "opd", "distill": {"form": "top_k"}}, "teacher_top_logprobs"),
    ],
)
def test_a_missing_column_is_an_error_and_never_a_silent_zero(fields: dict[str, Any], column: str) -> None:
    case: Example = example()
    del case.extras[column]
    with pytest.raises(MissingColumn, match=f"needs the column '{column}', but the batch has"):
        loss_of(options_of(fields), case.tokens())


def test_every_algorithm_has_a_term_and_every_option_reaches_it() -> None:
    import inspect

    elsewhere = {"overlong_buffer", "overlong_penalty", "value_clip", "budget", "rule"}
    assert TERMS.keys() == BY_NAME.keys()
    for name, options in BY_NAME.items():
        own = options.model_fields.keys() - PolicyOptions.model_fields.keys()
        keywords = inspect.signature(TERMS[name]).parameters.keys()
        assert own - elsewhere <= keywords, f"{name}: {own - elsewhere - keywords} reach no code"
        for keyword, parameter in inspect.signature(TERMS[name]).parameters.items():
            if keyword in own:
                assert parameter.default == options.model_fields[keyword].default, f"{name}.{keyword}: two defaults"
