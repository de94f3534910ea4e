"""Taking a trainer off its device and putting it back: on a CPU the same storages are emptied and filled as on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from services.trainer.megatron.offload import Offload
from tests.trainer.policies import equal, state, train, weights


def held(policy: Any) -> int:
    """Bytes of the distinct storages that lie on the device."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in policy.resident()}.values())


def test_nothing_is_left_on_the_device_and_everything_comes_back(make_policy: Callable[..., Any]) -> None:
    policy, twin = make_policy(), make_policy()
    train(policy, range(2))
    train(twin, range(2))
    before, size = state(policy), held(policy)
    parameters = sum(p.numel() * p.element_size() for chunk in policy.chunks for p in chunk.parameters())
    assert size >= 4 * parameters, "weights, gradients and two moments"
    offload = Offload()
    freed = offload.off(policy.resident())
    assert freed == size
    assert held(policy) == 0
    assert offload.off(policy.resident()) == 0
    offload.back()
    offload.back()
    assert held(policy) == size
    assert equal(state(policy), before)
    assert train(policy, range(2, 4)) == train(twin, range(2, 4))
    assert equal(weights(policy), weights(twin))
    assert equal(state(policy), state(twin))


def test_tensors_that_share_memory_still_do(make_policy: Callable[..., Any]) -> None:
    whole = torch.arange(10.0)
    part = whole[3:6]
    offload = Offload()
    assert offload.off([part, whole]) == 40
    offload.back()
    part += 100
    assert whole.tolist() == [0, 1, 2, 103, 104, 105, 6, 7, 8, 9]


def test_on_a_cpu_sleeping_moves_nothing(make_policy: Callable[..., Any]) -> None:
    """It would only copy within the same memory. The turns are counted all the same (services/trainer/turn.py)."""
    policy = make_policy()
    size = held(policy)
    policy.sleep()
    assert held(policy) == size
    policy.wake()
    assert held(policy) == size
