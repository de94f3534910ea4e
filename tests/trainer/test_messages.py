"""What goes between ranks comes out as it went in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from services.trainer.batches import pack
from services.trainer.messages import decode, encode
from services.trainer.objectives import SFT, Objective
from services.trainer.spread import Spread, empty_like
from shared.algorithms import GspoConfig
from tests.trainer.conftest import samples


def test_micro_batches() -> None:
    first, second = pack(samples(4), 1000)[0], pack(samples(3, seed=1), 1000)[0]
    found = decode(encode({"do": "train", "spread": Spread(((first, empty_like(first)), (second,)))}))["spread"]
    assert [len(batches) for batches in found.replicas] == [2, 1]
    for left, right in zip((first, empty_like(first), second), sum(found.replicas, ()), strict=True):
        for field in dataclasses.fields(left):
            before, after = getattr(left, field.name), getattr(right, field.name)
            if isinstance(before, np.ndarray):
                np.testing.assert_array_equal(before, after)
                assert before.dtype == after.dtype
            else:
                assert before == after


def test_objectives() -> None:
    objective = Objective("policy", GspoConfig(clip_low=0.01), {"radius": 0.5})
    assert decode(encode(objective)) == objective
    assert decode(encode(SFT)) == SFT
    assert decode(encode(Objective("dpo", constants={"beta": 0.2}))).constants == {"beta": 0.2}


def test_plain_values_and_arrays_with_dimensions() -> None:
    array = np.arange(6, dtype="<i4").reshape(2, 3)
    found = decode(encode([None, 1.5, "a", {"x": array}, np.float32(0.5)]))
    np.testing.assert_array_equal(found[3]["x"], array)
    assert found[:3] == [None, 1.5, "a"]
    assert found[4] == 0.5


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match="function cannot be sent to other ranks"):
        encode({"loss": lambda tokens: tokens})
