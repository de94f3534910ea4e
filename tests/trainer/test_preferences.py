"""The preference phase: pairs stay together, the reference is the policy at the beginning, and it learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer.batches import Packer, SampleTooLong, pack
from services.trainer.preferences import (
    Pair,
    PreferenceStep,
    numbered,
    preference_pair,
    run_preferences,
    with_reference,
)
from shared.config import ConfigError
from shared.sections import OptimizerConfig, PreferencesConfig
from tests.trainer.test_advantages import run_of

END = 1


def pairs() -> list[Pair]:
    """Backwards is better than forwards."""
    return [
        preference_pair([a, b], [b, a, END], [a, b, b, END], f"pair-{a}{b}") for a in range(2, 7) for b in range(2, 7)
    ]


def options(**changes: Any) -> PreferencesConfig:
    fields: dict[str, Any] = {
        "source": "unused.here",
        "steps": 15,
        "batch": 10,
        "optimizer": OptimizerConfig(lr=5e-3, betas=(0.9, 0.98)),
    }
    return PreferencesConfig(**{**fields, **changes})


def prefer(policy: Any, data: Any, **changes: Any) -> list[PreferenceStep]:
    seen: list[PreferenceStep] = []
    done = run_preferences(policy, data, options(**changes), token_budget=60, on_step=seen.append)
    assert done == len(seen)
    return seen


def test_both_completions_of_a_pair_share_a_micro_batch() -> None:
    packer = Packer(30)  # a pair has 11 tokens
    batches = [b for number, pair in enumerate(pairs()[:5]) for b in packer.add(*numbered(pair, number))]
    batches += packer.flush()
    assert [len(batch.lengths_S) for batch in batches] == [4, 4, 2]
    for batch in batches:
        for number in np.unique(batch.extras["pair"]):
            sides = batch.extras["chosen"][batch.extras["pair"] == number]
            assert sorted(sides) == [-1, -1, -1, -1, 1, 1, 1]
    with pytest.raises(SampleTooLong, match="pair-22: 2 sequences that belong together of 11 tokens"):
        Packer(10).add(*pairs()[0])


def test_the_reference_is_the_policy_as_it_is(make_policy: Callable[..., Any]) -> None:
    policy = make_policy()
    for pair in with_reference(policy, pairs()[:4], token_budget=40):
        for sample in pair:
            (batch,) = pack([sample], 100)
            expected, _ = policy.logprobs(batch)
            np.testing.assert_allclose(sample.extras["reference_logprobs"], expected, atol=1e-5)


def test_learns_and_repeats_to_the_bit(make_policy: Callable[..., Any]) -> None:
    first, second = make_policy(), make_policy()
    seen = prefer(first, pairs())
    assert seen[0].loss == pytest.approx(np.log(2), abs=1e-6), "at the reference both completions have gained nothing"
    assert seen[-1].accuracy > 0.9
    assert seen[-1].loss < 0.7 * seen[0].loss
    assert prefer(second, iter(pairs() * 6)) == seen, "a list is gone through again"
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first.hf_tensors(), second.hf_tensors(), strict=True))


def test_more_pairs_in_a_batch_than_there_are(make_policy: Callable[..., Any]) -> None:
    """A pair that is in a batch twice counts twice, not as one pair of double length."""
    once = prefer(make_policy(), pairs()[:3], steps=2, batch=3)
    twice = prefer(make_policy(), pairs()[:3], steps=2, batch=6)
    assert [step.loss for step in twice] == pytest.approx([step.loss for step in once], rel=1e-4)
    assert prefer(make_policy(), []) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a", "chosen": "b"}', r"pairs.jsonl:1: expected an object with `prompt`, `chosen`, `rejected`"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{', "pairs.jsonl:2: not JSON"),
        ("", "trainer.preferences.source: .*pairs.jsonl is empty"),
        (None, "trainer.preferences.source: cannot read"),
    ],
)
def test_a_file_of_pairs_that_cannot_be_read_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, message: str
) -> None:
    from services.trainer import start

    monkeypatch.setattr(start, "Tokenizer", lambda folder: None)
    if text is not None:
        (tmp_path / "pairs.jsonl").write_text(text)
    config = run_of({}, base=str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        list(start.pairs(config, options(source="pairs.jsonl")))
