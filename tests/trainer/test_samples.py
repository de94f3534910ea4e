"""Columns of a group become columns of its samples, and what is not finite is left out and counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.trainer.advantages import TokenAdvantages, token_advantages
from services.trainer.batches import pack
from services.trainer.samples import critic_samples, policy_samples, token_ages
from shared import columns, wire
from shared.records import Group, ints
from tests.trainer.test_advantages import group_of, run_of

NAN = float("nan")


def everything() -> tuple[Group, Any]:
    """A group with all columns of a run that uses them all."""
    run = run_of(
        {
            "name": "ppo",
            "old_logprobs": "interpolated",
            "kl": {"coef": 0.1, "use": "loss", "estimator": "k3"},
            "distill": {"coef": 0.5, "form": "top_k"},
        },
        critic={},
        reference={},
        teacher={"path": "t", "top_k": 2},
    )
    count = np.arange(5.0)
    group = group_of(
        [1.0, 0.0], [3, 2], run, reference_logprobs=-count, teacher_logprobs=-count, values=count,
        teacher_top_logprobs=np.stack([-count, -count - 1], axis=1),
    )  # fmt: skip
    group.id_columns = {"teacher_top_ids": ints(np.stack([np.arange(5), np.arange(5) + 1], axis=1))}
    return group, run


def test_every_column_reaches_the_samples_that_need_it() -> None:
    group, run = everything()
    assert columns.needed(run) == {
        "reference_logprobs": 1,
        "teacher_logprobs": 1,
        "teacher_top_ids": 2,
        "teacher_top_logprobs": 2,
        "values": 1,
    }
    assert columns.missing(wire.decode(wire.encode(group), Group), columns.needed(run)) is None
    (found,) = token_advantages([group], run)
    first, second = policy_samples(group, found, run, update=3)
    assert set(first.extras) == {
        "reference_logprobs", "teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs", "age",
    }  # fmt: skip
    assert second.extras["reference_logprobs"].tolist() == [-3, -4]
    assert second.extras["teacher_top_ids"].tolist() == [[3, 4], [4, 5]]
    assert second.extras["age"].tolist() == [3, 3]
    assert first.prompt_len == 2
    assert len(first.ids) == 5
    np.testing.assert_array_equal(np.concatenate([first.advantage, second.advantage]), found.advantages_N)
    critic = list(critic_samples(group, found))
    assert set(critic[0].extras) == {"values", "returns"}
    assert found.returns_N is not None
    np.testing.assert_array_equal(critic[1].extras["returns"], found.returns_N[3:])
    with pytest.raises(ValueError, match="only 'gae' advantages have returns"):
        list(critic_samples(group, TokenAdvantages(found.advantages_N)))


def test_a_group_without_a_column_is_refused() -> None:
    group, run = everything()
    (found,) = token_advantages([group], run)
    for name in ("teacher_logprobs", "reference_logprobs"):
        spoilt = replace(group, columns={n: c for n, c in group.columns.items() if n != name})
        assert columns.missing(spoilt, columns.needed(run)) is not None
        with pytest.raises(ValueError, match=f"0-0: the column '{name}' is missing"):
            list(policy_samples(spoilt, found, run, update=0))
    with pytest.raises(ValueError, match="columns: values has shape"):
        replace(group, columns={"values": group.columns["values"][:-1]})


def test_a_reference_inside_the_trainer_is_not_expected_on_arrival() -> None:
    for place, expected in (("service", {"reference_logprobs": 1}), ("trainer", {})):
        run = run_of({"kl": {"coef": 0.1}}, reference={"place": place})
        assert columns.travelling(run) == expected
        assert columns.needed(run) == {"reference_logprobs": 1}
        group = group_of([1.0, 0.0], [1, 1], run)
        assert (columns.missing(group, columns.travelling(run)) is None) == (place == "trainer")


def test_ages_follow_the_spans_and_never_fall_below_zero() -> None:
    group, _ = everything()
    assert group.samples is not None
    spans = {
        "span_sample": ints([1, 0, 0]),
        "span_start": ints([0, 0, 1]),
        "span_end": ints([2, 1, 3]),
        "span_version": ints([9, 7, 8]),
        "span_step": ints([9, 2, 4]),
    }
    group = replace(group, samples=replace(group.samples, **spans))
    assert token_ages(group, update=5).tolist() == [3, 1, 1, 0, 0]


def test_a_token_whose_column_is_not_finite_is_left_out_and_counted() -> None:
    run = run_of({"name": "opd"}, teacher={"path": "t"})
    group = group_of([1.0, 0.0], [3, 2], run, teacher_logprobs=[-1, NAN, -1, -1, -1])
    (found,) = token_advantages([group], run)
    (batch,) = pack(policy_samples(group, found, run, update=0), 100)
    assert batch.nonfinite == 1
    assert batch.mask_N.tolist().count(False) == 1
    assert (batch.extras["teacher_logprobs"][batch.mask_N] == -1).all()


def test_no_trained_token_at_all_can_be_packed() -> None:
    group, run = everything()
    assert group.samples is not None
    group = replace(group, samples=replace(group.samples, mask=np.zeros(5, dtype="|u1")))
    (found,) = token_advantages([group], run)
    (batch,) = pack(policy_samples(group, found, run, update=0), 100)
    assert len(batch.mask_N) == 0
    assert batch.extras["teacher_top_ids"].shape == (0, 2)
