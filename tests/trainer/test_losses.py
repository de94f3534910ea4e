"""What no number of the archive shows: masks, non-finite input, sums that add up, and what the metrics mean.

The numbers themselves: test_loss_oracle.py and test_loss_terms.py. What holds for every loss: test_loss_properties.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from services.trainer.algorithms import policy_loss
from services.trainer.algorithms.reductions import Tokens, finish, merge, reduce
from services.trainer.algorithms.sft import sft
from shared.algorithms import GrpoConfig


def grpo(tokens: Tokens, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss with the run file's options."""
    return policy_loss(GrpoConfig(**options))(tokens)


def example(*, seed: int = 0, **changes: Any) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return torch.randn(10, dtype=torch.float64, generator=generator)

    fields: dict[str, Any] = {
        "logprobs_N": (draw() * 0.3 - 2).requires_grad_(),
        "rollout_logprobs_N": draw() * 0.3 - 2,
        "advantages_N": draw(),
        "mask_N": torch.ones(10, dtype=torch.bool),
        "sequence_N": torch.tensor([0, 0, 0, 1, 1, 1, 1, 3, 3, 3]),
        "sequences": 4,
        "entropy_N": draw().abs(),
    }
    return Tokens(**{**fields, **changes})


def test_masked_tokens_leave_numerator_denominator_and_gradient() -> None:
    """A token without a finite log-probability from the engine, which packing hands over as zero, counts nowhere."""
    mask_N = torch.tensor([True, False, True, True, True, False, True, True, True, True])
    whole = example()
    spoilt = example(
        mask_N=mask_N,
        rollout_logprobs_N=torch.where(mask_N, whole.rollout_logprobs_N, torch.nan),
        logprobs_N=whole.logprobs_N,
    )
    kept = Tokens(
        **{
            name: getattr(whole, name)[mask_N]
            for name in ("rollout_logprobs_N", "advantages_N", "mask_N", "sequence_N")
        },
        logprobs_N=whole.logprobs_N[mask_N],
        entropy_N=whole.entropy_N[mask_N] if whole.entropy_N is not None else None,
        sequences=4,
    )
    for options in (
        {},
        {"old_logprobs": "rollout"},
        {"reduction": "sequence_mean"},
        {"reduction": "constant", "max_tokens": 8},
    ):
        loss, metrics = grpo(spoilt, **options)
        expected, expected_metrics = grpo(kept, **options)
        assert {k: float(v.detach()) for k, v in metrics.items()} == pytest.approx(
            {k: float(v.detach()) for k, v in expected_metrics.items()}
        )
        (gradient,) = torch.autograd.grad(loss, whole.logprobs_N, retain_graph=True)
        (expected_gradient,) = torch.autograd.grad(expected, whole.logprobs_N, retain_graph=True)
        torch.testing.assert_close(gradient, expected_gradient)
        assert (gradient[~mask_N] == 0).all()


def test_a_sequence_with_all_tokens_masked_leaves_the_denominator_but_an_empty_one_stays() -> None:
    mask_N = torch.tensor([False] * 3 + [True] * 7)  # sequence 0 is masked; sequence 2 never had tokens
    _, denominator = reduce(torch.ones(10), example(mask_N=mask_N), "sequence_mean")
    assert int(denominator) == 3


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_sums_of_parts_are_the_sum_of_the_whole(reduction: Any) -> None:
    whole = example()
    cut = whole.sequence_N < 1
    parts = [
        Tokens(
            **{
                n: getattr(whole, n)[w]
                for n in ("logprobs_N", "rollout_logprobs_N", "advantages_N", "mask_N", "entropy_N")
            },
            sequence_N=whole.sequence_N[w] - shift,
            sequences=count,
        )
        for w, shift, count in ((cut, 0, 1), (~cut, 1, 3))
    ]
    _, expected = grpo(whole, reduction=reduction, max_tokens=8)
    merged = merge({k: float(v) for k, v in grpo(part, reduction=reduction, max_tokens=8)[1].items()} for part in parts)
    assert merged == pytest.approx({k: float(v) for k, v in expected.items()})


def test_metrics_say_what_they_mean() -> None:
    tokens = example()
    _, sums = grpo(tokens, old_logprobs="rollout")
    metrics = finish({name: float(value.detach()) for name, value in sums.items()})
    ratio_N = (tokens.logprobs_N - tokens.rollout_logprobs_N).exp().detach()
    assert metrics["ratio"] == pytest.approx(float(ratio_N.mean()))
    assert metrics["ratio_max"] == pytest.approx(float(ratio_N.max()))
    assert metrics["mismatch_kl"] == pytest.approx(float((ratio_N - 1 - ratio_N.log()).mean()))
    assert metrics["tis_weight"] == 1.0
    assert metrics["entropy"] == pytest.approx(float(tokens.entropy_N.mean()))  # type: ignore[union-attr]
    assert metrics["tokens"] == metrics["denominator"] == 10
    assert finish({"loss": 0.0, "denominator": 0.0, "tokens": 0.0, "ratio": 0.0})["loss"] == 0.0


def test_old_logprobs_choose_what_corrects_for_staleness() -> None:
    """`trainer`: ratio 1 and a capped weight. `rollout`: the ratio is clipped and the weight is 1. Far apart both hold back."""
    tokens = example(rollout_logprobs_N=torch.full((10,), -9.0, dtype=torch.float64), advantages_N=torch.ones(10))
    _, trainer = grpo(tokens)
    assert float(trainer["ratio_max"]) == 1.0
    assert float(trainer["tis_weight"]) == 20.0
    rollout_loss, rollout = grpo(tokens, old_logprobs="rollout")
    assert float(rollout["clip_fraction"]) == 10
    assert torch.autograd.grad(rollout_loss, tokens.logprobs_N)[0].abs().max() == 0


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_token_that_has_become_endlessly_likelier_does_not_spoil_the_gradient(sign: float) -> None:
    tokens = Tokens(
        logprobs_N=torch.tensor([-1.0, -0.5], requires_grad=True),
        rollout_logprobs_N=torch.tensor([-200.0, -0.6]),
        advantages_N=torch.tensor([sign, sign]),
        mask_N=torch.ones(2, dtype=torch.bool),
        sequence_N=torch.zeros(2, dtype=torch.long),
        sequences=1,
    )
    loss, metrics = grpo(tokens, old_logprobs="rollout")
    loss.backward()
    assert tokens.logprobs_N.grad is not None
    assert tokens.logprobs_N.grad[0] == 0
    assert all(torch.isfinite(value).all() for value in (tokens.logprobs_N.grad, *metrics.values()))


def test_empty_micro_batch_has_a_loss_of_zero_that_can_be_differentiated() -> None:
    none = torch.zeros(0)
    tokens = Tokens(none.clone().requires_grad_(), none, none, none.bool(), none.long(), sequences=2)
    for loss in (grpo, sft):
        total, metrics = loss(tokens)
        total.backward()
        assert float(total) == float(metrics["denominator"]) == 0


def test_sft_is_cross_entropy() -> None:
    logits_NV = torch.randn(10, 7, dtype=torch.float64, requires_grad=True)
    targets_N = torch.randint(0, 7, (10,))
    logprobs_N = logits_NV.log_softmax(-1).gather(1, targets_N[:, None]).squeeze(1)
    total, metrics = sft(example(logprobs_N=logprobs_N))
    torch.testing.assert_close(total / metrics["denominator"], F.cross_entropy(logits_NV, targets_N))
