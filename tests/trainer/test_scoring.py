"""The joined product, softmax and choice give what torch gives step by step, whole or in chunks."""

from __future__ import annotations

import pytest
import torch

from services.trainer.megatron.scoring import LOGIT_ELEMENTS, likeliest, score_tokens


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 50, (23, 3), generator=generator)


@pytest.mark.parametrize("elements", [LOGIT_ELEMENTS, 1000, 150, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_entropy_and_gradients_are_torchs(elements: int, temperature: float) -> None:
    hidden_NH, weight_VH, ids_NK = inputs()
    expected_NV = (hidden_NH @ weight_VH.t() / temperature).log_softmax(-1)
    logprobs_NK, entropy_N = score_tokens(hidden_NH, weight_VH, ids_NK, temperature, elements=elements)
    torch.testing.assert_close(logprobs_NK, expected_NV.gather(1, ids_NK), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy_N, -(expected_NV.exp() * expected_NV).sum(-1), rtol=1e-5, atol=1e-5)
    assert not entropy_N.requires_grad

    weights_NK = torch.arange(69.0).view(23, 3).cos()
    theirs = torch.autograd.grad((expected_NV.gather(1, ids_NK) * weights_NK).sum(), (hidden_NH, weight_VH))
    ours = torch.autograd.grad((logprobs_NK * weights_NK).sum(), (hidden_NH, weight_VH))
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_gradients_against_differences() -> None:
    hidden, weight, ids = inputs(torch.float64)

    def exact(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (hidden @ weight.t()).log_softmax(-1).gather(1, ids)

    grad = torch.autograd.grad(exact(hidden, weight).sum(), (hidden, weight))
    found = torch.autograd.grad(
        score_tokens(hidden.float(), weight.float(), ids, 1.0, elements=200)[0].sum(), (hidden, weight)
    )
    for left, right in zip(found, grad, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_bfloat16_chunks_add_up_in_float32() -> None:
    whole, chunked = (
        torch.autograd.grad(score_tokens(h, w, ids, 1.0, elements=elements)[0].sum(), (h, w))
        for elements in (LOGIT_ELEMENTS, 50)
        for h, w, ids in [inputs(torch.bfloat16)]
    )
    for left, right in zip(whole, chunked, strict=True):
        assert left.dtype is torch.bfloat16
        torch.testing.assert_close(left, right, rtol=0.02, atol=0.05)


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    logprobs, entropy = score_tokens(hidden, weight, torch.tensor([[0], [0]]), 1.0)
    assert logprobs[:, 0].tolist() == [0.0, -2e4]
    assert torch.isfinite(entropy).all()
    logprobs.sum().backward()
    assert torch.isfinite(hidden.grad).all()  # type: ignore[arg-type]


def test_no_token_to_score() -> None:
    hidden, weight, ids = inputs()
    logprobs, entropy = score_tokens(hidden[:0], weight, ids[:0], 1.0)
    assert (logprobs.shape, entropy.shape) == ((0, 3), (0,))
    logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_the_likeliest() -> None:
    hidden, weight, _ = inputs()
    expected = (hidden @ weight.t()).topk(5, dim=-1).indices
    for elements in (LOGIT_ELEMENTS, 120):
        torch.testing.assert_close(likeliest(hidden, weight, 5, 0.5, elements=elements), expected)
