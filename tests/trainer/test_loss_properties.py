"""What holds for every loss: how a batch is padded, cut, dealt to ranks or ordered changes nothing; ratio 1 is the policy
gradient; what is masked has no gradient; numbers far out stay finite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.algorithms import first_pass, needs_first_pass, policy_loss
from services.trainer.algorithms.ppo import critic
from services.trainer.algorithms.reductions import Loss, merge
from services.trainer.algorithms.sft import sft
from shared.algorithms import BY_NAME, PolicyOptions
from tests.trainer.numeric import Example, example

OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in BY_NAME},
    "grpo, all masks": {
        "name": "grpo",
        "reduction": "sequence_mean",
        "correction": {"mode": "sequence_mask", "geometric": [0.7, 1.3], "outlier": [0.3, 3.0], "opsm": 0.1},
    },
    "grpo, kl": {"name": "grpo", "kl": {"coef": 0.2, "unbiased": True}, "reduction": "constant"},
    "sapo, sequence": {"name": "sapo", "level": "sequence"},
    "luspo": {"name": "gspo", "reduction": "sequence_sum", "clip_low": 0.1, "clip_high": 0.2},
    "opd, top k": {"name": "opd", "distill": {"form": "top_k"}},
}
EVERY = [*OPTIONS, "sft", "critic"]
lengths = st.lists(st.integers(0, 5), min_size=1, max_size=6).map(tuple)
seeds = st.integers(0, 10_000)
few = settings(max_examples=10, deadline=None)


def options_of(name: str, **changes: Any) -> PolicyOptions:
    fields = {"max_tokens": 7, **OPTIONS[name], **changes}
    return BY_NAME[fields["name"]].model_validate(fields)


def loss_of(name: str, parts: list[Example], **changes: Any) -> Loss:
    """The loss of an update that consists of these micro-batches."""
    if name in ("sft", "critic"):
        return sft if name == "sft" else critic
    options = options_of(name, **changes)
    seen = [part.tokens() for part in parts]
    return policy_loss(options, first_pass(options, seen) if needs_first_pass(options) else None)


def run(loss: Loss, part: Example) -> tuple[dict[str, float], np.ndarray]:
    """(metric sums, gradient of the loss sum)."""
    tokens = part.tokens()
    total, metrics = loss(tokens)
    total.backward()
    assert tokens.logprobs_N.grad is not None
    sums = {name: float(value.detach()) for name, value in metrics.items()}
    assert sums["loss"] == float(total.detach())
    return sums, tokens.logprobs_N.grad.numpy()


def padded(case: Example, rng: np.random.Generator) -> Example:
    """Masked tokens full of NaN put at random into sequences that have others; where the old ones went is in `extras`."""
    rows = case.rows()
    order, fresh, sequence = [], [], []
    for number in range(case.sequences):
        places = np.flatnonzero(case.sequence == number).tolist()
        for _ in range(int(rng.integers(0, 3)) if len(rows[number]) else 0):
            places.insert(int(rng.integers(0, len(places) + 1)), -1)
        order += [max(place, 0) for place in places]
        fresh += [place < 0 for place in places]
        sequence += [number] * len(places)
    taken, new = np.array(order, dtype=int), np.array(fresh, dtype=bool)

    def column(values: np.ndarray) -> np.ndarray:
        shape = (-1, *[1] * (values.ndim - 1))
        return np.where(new.reshape(shape), np.nan, values[taken])

    return Example(
        np.where(new, -3.0, case.logprobs[taken]),
        column(case.rollout),
        np.where(new, 5.0, case.advantages[taken]),
        ~new & case.mask[taken],
        np.array(sequence, dtype=int),
        case.sequences,
        {**{name: column(values) for name, values in case.extras.items()}, "old_place": np.where(new, -1, taken)},
    )


@pytest.mark.parametrize("name", EVERY)
@few
@given(shape=lengths, seed=seeds)
def test_padding_changes_nothing(name: str, shape: tuple[int, ...], seed: int) -> None:
    case = example(shape, seed=seed)
    if not len(case.logprobs):
        return
    wide = padded(case, np.random.default_rng(seed))
    sums, gradient = run(loss_of(name, [case]), case)
    wide_sums, wide_gradient = run(loss_of(name, [wide]), wide)
    assert wide_sums == pytest.approx(sums, abs=1e-9)
    places = wide.extras["old_place"]
    assert (wide_gradient[places < 0] == 0).all()
    np.testing.assert_allclose(wide_gradient[places >= 0], gradient[places[places >= 0]], atol=1e-9)


@pytest.mark.parametrize("name", EVERY)
@few
@given(shape=lengths, seed=seeds, data=st.data())
def test_micro_batches_ranks_and_order_change_nothing(
    name: str, shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    """Sequences in any order, dealt to ranks that cut their share into micro-batches: sums over all are those of the whole."""
    case = example(shape, seed=seed)
    order = data.draw(st.permutations(range(len(shape))))
    owner = [data.draw(st.tuples(st.integers(0, 1), st.integers(0, 2))) for _ in order]  # (rank, micro-batch)
    cells = [[s for s, own in zip(order, owner, strict=True) if own == cell] for cell in sorted(set(owner))]
    parts = [case.part(cell) for cell in cells]
    whole_sums, whole_gradient = run(loss_of(name, [case]), case)
    loss = loss_of(name, parts)
    found = [run(loss, part) for part in parts]
    assert merge([sums for sums, _ in found]) == pytest.approx(whole_sums, abs=1e-9)
    for cell, (_, gradient) in zip(cells, found, strict=True):
        expected = [whole_gradient[case.sequence == number] for number in cell]
        np.testing.assert_allclose(gradient, np.concatenate(expected), atol=1e-9)


@pytest.mark.parametrize("name", list(BY_NAME))
@few
@given(
    shape=lengths, seed=seeds, reduction=st.sampled_from(["token_mean", "sequence_mean", "sequence_sum", "constant"])
)
def test_ratio_one_is_the_policy_gradient(name: str, shape: tuple[int, ...], seed: int, reduction: str) -> None:
    """On policy every algorithm's gradient is that of - A log p, by the token or by the sequence."""
    case = example(shape, seed=seed, distance=0.0)
    teacher = case.extras["teacher_logprobs"] - case.logprobs if name == "opd" else np.zeros_like(case.logprobs)
    advantages = np.random.default_rng(seed).normal(size=case.sequences)[case.sequence]
    case = replace(case, advantages=advantages, extras={**case.extras, "age": np.zeros(len(case.logprobs))})
    _, gradient = run(loss_of(name, [case], reduction=reduction), case)
    expected = np.zeros_like(case.logprobs)
    for row in case.rows():
        if len(row):
            expected[row] = -(teacher if name == "opd" else advantages)[row]
            expected[row] /= len(row) if reduction == "sequence_mean" else 1
    np.testing.assert_allclose(gradient, expected, atol=1e-9)


@pytest.mark.parametrize("name", EVERY)
@few
@given(shape=lengths, seed=seeds)
def test_what_is_masked_has_no_gradient_and_nothing_but_masks_is_zero(
    name: str, shape: tuple[int, ...], seed: int
) -> None:
    case = example(shape, seed=seed, masked=0.5)
    _, gradient = run(loss_of(name, [case]), case)
    assert np.isfinite(gradient).all()
    assert (gradient[~case.mask] == 0).all()
    none = replace(case, mask=np.zeros_like(case.mask), rollout=np.full_like(case.rollout, np.nan))
    sums, gradient = run(loss_of(name, [none]), none)
    assert sums["loss"] == 0
    assert sums["tokens"] == 0
    assert (gradient == 0).all()
    assert all(np.isfinite(value) for value in sums.values())


@pytest.mark.parametrize("name", list(BY_NAME))
@few
@given(seed=seeds)
def test_numbers_far_out_stay_finite_in_float32(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    case = example((4, 3, 5), seed=seed, masked=0.0)
    far = rng.choice([-200.0, -50.0, -1e-6, -1.0], size=(2, len(case.logprobs)))
    case = replace(case, logprobs=far[0], rollout=far[1])
    if name == "opd":
        case.extras["teacher_logprobs"] = rng.choice([-200.0, -1.0], size=len(far[0]))
    tokens = case.tokens()
    single = {
        field: getattr(tokens, field).detach().float() for field in ("logprobs_N", "rollout_logprobs_N", "advantages_N")
    }
    tokens = replace(
        tokens,
        **{**single, "logprobs_N": single["logprobs_N"].requires_grad_()},
        extras={column: values.float() for column, values in tokens.extras.items()},
    )
    options = options_of(name, kl={"coef": 0.1, "use": "loss", "estimator": "k3"})
    constants = first_pass(options, [tokens]) if needs_first_pass(options) else None
    total, metrics = policy_loss(options, constants)(tokens)
    total.backward()
    assert tokens.logprobs_N.grad is not None
    assert torch.isfinite(total)
    assert torch.isfinite(tokens.logprobs_N.grad).all()
    assert all(torch.isfinite(value).all() for value in metrics.values())
