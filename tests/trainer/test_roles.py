"""The models beside the policy: what they add to a group, what the critic learns, what moves the reference, what is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.trainer import references
from services.trainer.algorithms import policy_loss
from services.trainer.megatron.policy import Policy, StateMismatch
from services.trainer.roles import Roles, score
from services.trainer.update import UpdateBatches
from shared.config import RunConfig
from shared.records import Group
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


def policy_update(policy: Policy, config: RunConfig, filled: list[Group]) -> None:
    """Move the policy on these groups."""
    batches = UpdateBatches(config, 0)
    loss = policy_loss(config.algorithm)
    denominator = 0.0
    for group in filled:
        for packed in batches.add(group):
            denominator += policy.forward_backward(packed, loss)["denominator"]
    assert policy.update(denominator, 1e-2)["updated"] == 1.0


def test_a_reference_in_the_trainer_stays_where_the_policy_was(
    make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    config = run(REFERENCE, tmp_path, reference={"place": "trainer", "refresh_every": 2})
    policy = make_policy()
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


def test_a_reference_from_a_folder(make_policy: Callable[..., Policy], untied_folder: Path, tmp_path: Path) -> None:
    config = run(REFERENCE, tmp_path, reference={"place": "trainer", "path": str(untied_folder)})
    policy, other = make_policy(untied_folder), make_policy(untied_folder)
    policy.load_state_dict(
        {**policy.state_dict(), **{k: v * 1.1 for k, v in policy.state_dict().items() if "model." in k}}
    )
    roles = Roles(config, policy)
    roles.begin()
    group = groups(config)[0]
    roles.fill(group)
    np.testing.assert_array_equal(group.columns["reference_logprobs"], score(other, group, config))
    assert np.abs(score(policy, group, config) - score(other, group, config)).max() > 1e-3


def test_the_critic_learns_the_returns_and_leaves_the_policy_alone(
    make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    critic = {"optimizer": {"lr": 1e-2}, "warmup_steps": 3}
    config = run(PPO, tmp_path, critic=critic)
    policy = make_policy()
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
    make_policy: Callable[..., Policy], tmp_path: Path, algorithm: dict[str, Any], sections: dict[str, Any]
) -> None:
    config = run(algorithm, tmp_path, **sections)
    first = Roles(config, make_policy())
    first.begin()
    filled = groups(config)
    for group in filled:
        first.fill(group)
    first.learn(filled, 0)
    policy_update(first.policy, config, filled)
    saved = {name: tensor.clone() for name, tensor in (first.policy.state_dict() | first.state_dict()).items()}
    second = Roles(config, make_policy(seed=7))
    second.policy.load_state_dict(saved)
    second.load_state_dict(saved, step=1)
    for roles in (first, second):
        roles.fill(filled[0])
        roles.learn([filled[0]], 1)
    for name, tensor in (first.policy.state_dict() | first.state_dict()).items():
        assert torch.equal(tensor, (second.policy.state_dict() | second.state_dict())[name]), name
    with pytest.raises(StateMismatch):
        second.load_state_dict(second.policy.state_dict(), step=1)


def test_the_reference_for_a_process_of_its_own_is_written_when_due(
    make_policy: Callable[..., Policy], tmp_path: Path
) -> None:
    config = run(REFERENCE, tmp_path, reference={"refresh_every": 2})
    roles = Roles(config, make_policy())
    roles.begin()
    assert set(references.written(config)) == {0}
    for step in range(1, 7):
        roles.moved(step)
    assert set(references.written(config)) == {4, 6}, "the newest two"
    assert references.newest(config) == (6, references.folder(config, 6))
    roles.load_state_dict(roles.policy.state_dict(), step=5)
    assert set(references.written(config)) == {4}, "step 6 is undone"
    roles.begin()
    assert set(references.written(config)) == {0}, "a new run in the same folder begins anew"
