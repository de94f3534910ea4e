"""The models beside the policy: what they add to a group, what the critic learns, what moves the reference, what is saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import references
from services.trainer.build import build_rank
from services.trainer.megatron.state import StateMismatch
from services.trainer.objectives import Objective
from services.trainer.ranks import RankedPolicy
from services.trainer.roles import Roles, score
from services.trainer.state_files import file_of, write
from services.trainer.update import UpdateBatches
from shared.config import RunConfig
from shared.records import Group
from tests.trainer.policies import equal
from tests.trainer.test_advantages import group_of, run_of

REFERENCE: dict[str, Any] = {"name": "grpo", "kl": {"coef": 0.1}}
PPO: dict[str, Any] = {"name": "ppo"}


def run(algorithm: dict[str, Any], folder: Path, **changes: Any) -> RunConfig:
    sizes = {"sampling": {"max_new_tokens": 10, "max_prompt_tokens": 10}, "trainer": {"micro_batch_tokens": 40}}
    return run_of(algorithm, steps=50, workdir=str(folder), **sizes, **changes)


def groups(config: RunConfig) -> list[Group]:
    """The four groups of an update, without columns."""
    return [
        group_of([1.0, float(i % 2)], [4, 3 + i], config, number=i, mask=[1, 1, 0, 1, *[1] * (3 + i)]) for i in range(4)
    ]


def alone(policy: Any, config: RunConfig) -> RankedPolicy:
    """A policy that can build others beside it."""
    return RankedPolicy.alone(policy, partial(build_rank, config, "cpu"))


def state(roles: Roles) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of all models."""
    models = roles.policy.ranks.models
    return {key: tensor for name, prefix in roles.states.items() for key, tensor in models[name].state_tensors(prefix)}


def restore(roles: Roles, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    write(folder / file_of(0), list(tensors.items()))
    roles.restore(folder, step=1)
    roles.policy.restore(folder)


def policy_update(policy: RankedPolicy, config: RunConfig, filled: list[Group]) -> None:
    """Move the policy on these groups."""
    batches = UpdateBatches(config, 0)
    loss = Objective("policy", config.algorithm)
    denominator = 0.0
    for group in filled:
        for packed in batches.add(group):
            denominator += policy.forward_backward(packed, loss)["denominator"]
    assert policy.update(denominator, 1e-2)["updated"] == 1.0


def test_a_reference_in_the_trainer_stays_where_the_policy_was(make_policy: Callable[..., Any], tmp_path: Path) -> None:
    config = run(REFERENCE, tmp_path, reference={"place": "trainer", "refresh_every": 2})
    policy = alone(make_policy(), config)
    roles = Roles(config, policy)
    roles.begin()
    before = [score(policy, group, config) for group in groups(config)]
    filled = groups(config)
    for group in filled:
        roles.fill(group)
    policy_update(policy, config, filled)
    roles.moved(1)
    moved = [score(policy, group, config) for group in filled]
    assert any(np.abs(new - old).max() > 1e-3 for new, old in zip(moved, before, strict=True))
    for group, old in zip(filled, before, strict=True):
        roles.fill(group)
        np.testing.assert_array_equal(group.columns["reference_logprobs"], old)
        assert old[2] == 0.0, "an environment wrote that token"
    roles.moved(2)
    roles.fill(filled[0])
    np.testing.assert_array_equal(filled[0].columns["reference_logprobs"], moved[0])
    for group, new in zip(filled, moved, strict=True):
        np.testing.assert_array_equal(score(policy, group, config), new, err_msg="scoring moved the policy")


def test_a_reference_from_a_folder(make_policy: Callable[..., Any], untied_folder: Path, tmp_path: Path) -> None:
    config = run(REFERENCE, tmp_path, reference={"place": "trainer", "path": str(untied_folder)})
    policy, other = alone(make_policy(untied_folder), config), alone(make_policy(untied_folder), config)
    for parameter in policy.local.chunks[0].parameters():
        parameter.data.mul_(1.1)
    roles = Roles(config, policy)
    roles.begin()
    group = groups(config)[0]
    roles.fill(group)
    np.testing.assert_array_equal(group.columns["reference_logprobs"], score(other, group, config))
    assert np.abs(score(policy, group, config) - score(other, group, config)).max() > 1e-3


def test_the_critic_learns_the_returns_and_leaves_the_policy_alone(
    make_policy: Callable[..., Any], tmp_path: Path
) -> None:
    critic = {"optimizer": {"lr": 1e-2}, "warmup_steps": 3}
    config = run(PPO, tmp_path, critic=critic)
    policy = alone(make_policy(), config)
    roles = Roles(config, policy)
    roles.begin()
    assert [roles.policy_waits(step) for step in (0, 2, 3)] == [True, True, False]
    before = score(policy, groups(config)[1], config)
    errors = []
    for step in range(40):
        filled = groups(config)
        for group in filled:
            roles.fill(group)
        if step == 0:
            assert all((group.columns["values"] == 0).all() for group in filled), "the head starts at zero"
        errors.append(roles.learn(filled, step)["critic_error"])
    assert errors[0] > 0.3
    assert errors[-1] < 0.1 * errors[0], errors
    np.testing.assert_array_equal(score(policy, groups(config)[1], config), before)


@pytest.mark.parametrize(
    ("algorithm", "sections"),
    [(PPO, {"critic": {"optimizer": {"lr": 1e-2}}}), (REFERENCE, {"reference": {"place": "trainer"}})],
    ids=["critic", "reference"],
)
def test_a_checkpoint_goes_on_bit_for_bit(
    make_policy: Callable[..., Any], tmp_path: Path, algorithm: dict[str, Any], sections: dict[str, Any]
) -> None:
    config = run(algorithm, tmp_path, **sections)
    first = Roles(config, alone(make_policy(), config))
    first.begin()
    filled = groups(config)
    for group in filled:
        first.fill(group)
    first.learn(filled, 0)
    policy_update(first.policy, config, filled)
    saved = state(first)
    second = Roles(config, alone(make_policy(seed=7), config))
    restore(second, saved, tmp_path)
    for roles in (first, second):
        roles.fill(filled[0])
        roles.learn([filled[0]], 1)
    assert equal(state(first), state(second))
    bare = {name: tensor for name, tensor in saved.items() if not name.startswith(("critic/", "reference/"))}
    with pytest.raises(StateMismatch, match="it is of a run with other models"):
        restore(second, bare, tmp_path)


def test_the_reference_for_a_process_of_its_own_is_written_when_due(
    make_policy: Callable[..., Any], tmp_path: Path
) -> None:
    config = run(REFERENCE, tmp_path, reference={"refresh_every": 2})
    roles = Roles(config, alone(make_policy(), config))
    roles.begin()
    assert set(references.written(config)) == {0}
    for step in range(1, 7):
        roles.moved(step)
    assert set(references.written(config)) == {4, 6}, "the newest two"
    assert references.newest(config) == (6, references.folder(config, 6))
    roles.restore(tmp_path / "unused", step=5)
    assert set(references.written(config)) == {4}, "step 6 is undone"
    roles.begin()
    assert set(references.written(config)) == {0}, "a new run in the same folder begins anew"
