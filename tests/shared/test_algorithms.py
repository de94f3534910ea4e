"""The run file's `algorithm:`: typed options by name, defaults of each, and every refused combination with its reason."""

import typing
from pathlib import Path

import pytest
import yaml

from shared import config
from shared.algorithms import BY_NAME, MEMBERS, AlgorithmConfig, GrpoConfig, GspoConfig
from shared.config import ConfigError

RUN = {
    "run": "demo",
    "steps": 4,
    "groups_per_step": 4,
    "samples_per_group": 2,
    "model": {"path": "model"},
    "prompts": {"source": "prompts.jsonl"},
    "reward": {"functions": [{"path": "task.reward"}]},
    "sampling": {"max_new_tokens": 100},
}
NEEDS = {
    "ppo": {"critic": {}},
    "opd": {"teacher": {"path": "teacher"}},
    "dapo": {"reward": {"functions": [{"path": "task.reward"}], "filters": ["zero_variance"]}},
}
"""What an algorithm cannot do without."""


def load(algorithm, **changes):
    return config.parse({**RUN, **changes, "algorithm": algorithm}, "run.yaml")


def test_the_union_and_the_table_hold_the_same_algorithms():
    assert set(typing.get_args(typing.get_args(AlgorithmConfig)[0])) == set(MEMBERS)
    assert len(BY_NAME) == len(MEMBERS)


@pytest.mark.parametrize("name", list(BY_NAME))
@pytest.mark.parametrize("staleness", [0, 3])
def test_every_algorithm_runs_with_its_own_defaults_at_any_staleness(name, staleness):
    loaded = load({"name": name}, max_staleness=staleness, **NEEDS.get(name, {}))
    assert type(loaded.algorithm) is BY_NAME[name]
    assert config.loads(loaded.dump()) == loaded
    assert loaded.algorithm.max_tokens == 100, "resolved from sampling.max_new_tokens"
    assert BY_NAME[name](name=name).max_tokens is None, "and the type's own default stays what it is"


def test_the_page_names_every_algorithm():
    page = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
    assert [name for name in BY_NAME if f"| `{name}` |" not in page] == []


def test_without_a_name_it_is_grpo():
    assert load({}).algorithm == load({"name": "grpo"}).algorithm
    assert config.parse(RUN, "run.yaml").algorithm == load({}).algorithm
    assert load({"clip_high": 0.3}).algorithm.clip_high == 0.3
    assert isinstance(load({}).algorithm, GrpoConfig)


def test_gspo_has_its_own_clip():
    options = load({"name": "gspo"}).algorithm
    assert isinstance(options, GspoConfig)
    assert (options.clip_low, options.clip_high) == (3e-4, 4e-4)


def test_a_section_given_in_part_keeps_the_algorithms_own_defaults():
    options = load({"name": "reinforce_pp", "advantage": {"gamma": 0.9}, "correction": {"high": 3}}).algorithm
    assert (options.advantage.name, options.advantage.whiten, options.advantage.gamma) == ("returns", True, 0.9)
    assert (options.correction.mode, options.correction.high) == ("token_truncate", 3)


def test_overrides_reach_options_of_the_chosen_algorithm(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    loaded = config.load(path, ["algorithm.name=gspo", "algorithm.clip_low=1e-3", "algorithm.kl.estimator=k2"])
    assert loaded.algorithm.clip_low == 1e-3
    assert loaded.algorithm.kl.estimator == "k2"


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"name": "grpoo"}, "algorithm.name: no algorithm is called 'grpoo'; did you mean 'grpo'"),
        ({"name": "xyz"}, "algorithm.name: no algorithm is called 'xyz'; known are grpo, dr_grpo"),
        ({"name": "gspo", "clip_lo": 1}, "algorithm.clip_lo: unknown field; did you mean 'clip_low'?"),
        ({"name": "rloo", "clip_low": 0.2}, "algorithm.clip_low: unknown field"),
        ({"name": "grpo", "kl": {"coeff": 1}}, "algorithm.kl.coeff: unknown field; did you mean 'coef'?"),
        ({"name": "cispo", "cap": 0.2}, "algorithm.cap: Input should be greater than 1"),
        ({"name": "dppo", "old_logprobs": "trainer"}, "algorithm.old_logprobs: Input should be 'rollout'"),
        ({"name": "grpo", "clip_low": 2}, "algorithm.clip_low: Input should be less than 1"),
        ({"name": "grpo", "reduction": "mean"}, "algorithm.reduction: Input should be 'token_mean'"),
    ],
)
def test_a_wrong_option_is_named_by_its_path(algorithm, message):
    with pytest.raises(ConfigError, match=message):
        load(algorithm)


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ({"name": "ppo"}, {}, "algorithm.advantage.name: 'gae' needs a critic's values; add the section `critic: {}`"),
        ({}, {"critic": {}}, "critic: grpo with 'group' advantages uses no values"),
        ({"name": "ppo", "advantage": {"name": "group"}}, {}, "ppo computes 'gae' advantages, not 'group'"),
        ({"name": "rloo", "advantage": {"name": "group"}}, {}, "rloo computes 'leave_one_out' advantages"),
        ({"name": "dr_grpo", "advantage": {"scale": "std"}}, {}, "dr_grpo does not divide by a deviation"),
        ({"name": "opd"}, {}, "algorithm.distill.coef: opd needs a teacher; add the section `teacher:"),
        ({}, {"teacher": {"path": "t"}}, "teacher: nothing uses it while algorithm.distill.coef is 0"),
        ({"name": "opd", "distill": {"coef": 0}}, {}, "coef and reward_weight are both 0"),
        ({"name": "opd", "distill": {"form": "top_k"}}, {"teacher": {"path": "t"}}, "teacher.top_k: distill.form 'top_k'"),
        ({"name": "opd"}, {"teacher": {"path": "t", "top_k": 8}}, "teacher.top_k: distill.form 'sampled' does not"),
        ({"kl": {"coef": 0.1}}, {}, "algorithm.kl.coef: needs a reference policy; add the section `reference: {}`"),
        ({}, {"reference": {}}, "reference: nothing uses it while algorithm.kl.coef is 0"),
        ({"kl": {"coef": 1, "estimator": "k1"}}, {"reference": {}}, "gradient of 'k1' as a loss is zero in expectation"),
        ({"kl": {"coef": 1, "use": "reward", "unbiased": True}}, {"reference": {}}, "kl.unbiased: concerns the loss"),
        ({"name": "gspo", "correction": {"geometric": [0.9, 1.1]}}, {}, "with old_logprobs 'rollout' the ratio itself holds"),
        ({"correction": {"low": 1.5}}, {}, r"algorithm.correction: \[low, high\] = \[1.5, 2.0\] does not hold 1"),
        ({"correction": {"high": 0.5}}, {}, "does not hold 1, the weight of a token on which engine and trainer agree"),
        ({"correction": {"geometric": [1.1, 1.2]}}, {}, r"algorithm.correction.geometric: \[1.1, 1.2\] does not hold 1"),
        ({"name": "dapo"}, {}, "reward.filters: dapo's dynamic sampling drops groups"),
        ({"name": "dapo", "overlong_buffer": 101}, NEEDS["dapo"], "algorithm.overlong_buffer: 101 exceeds"),
        ({"name": "cispo", "old_logprobs": "trainer"}, {}, "cispo would be a plain policy gradient; use 'rollout'"),
        ({"name": "decoupled_ppo", "old_logprobs": "rollout"}, {}, "so nothing is decoupled; use 'interpolated'"),
        ({"name": "gspo", "advantage": {"name": "returns"}}, {}, "algorithm.form: advantages that differ by token"),
        ({"name": "sapo", "level": "sequence", "advantage": {"name": "returns"}}, {}, "algorithm.level: advantages that"),
        ({"name": "opd"}, {"teacher": {"path": "t"}, "sampling": {"temperature": 0.7}}, "scores tokens at temperature 1"),
        (
            {"kl": {"coef": 1}},
            {"reference": {"refresh_every": 5}, "deterministic": True},
            "reference.refresh_every: with deterministic",
        ),
        ({}, {"window": 2, "deterministic": True}, "window: with deterministic: true the trainer takes groups strictly"),
        ({"max_tokens": 5}, {}, "algorithm.max_tokens: only the reduction 'constant' divides by it"),
    ],
)  # fmt: skip
def test_a_combination_that_cannot_work_is_refused_with_the_reason(algorithm, changes, message):
    with pytest.raises(ConfigError, match=message):
        load(algorithm, **changes)


def test_all_reasons_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        load({"name": "ppo", "kl": {"coef": 0.1}, "distill": {"coef": 1}})
    assert all(section in str(caught.value) for section in ("`critic: {}`", "`reference: {}`", "`teacher:"))


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ({"old_logprobs": "rollout"}, {}),
        ({"kl": {"coef": 0.1}}, {"reference": {}}),
        ({"kl": {"coef": 0.1, "estimator": "k1", "unbiased": True}}, {"reference": {"place": "trainer"}}),
        ({"name": "rloo", "kl": {"coef": 0.1, "use": "reward", "estimator": "k1"}}, {"reference": {}}),
        ({"distill": {"coef": 0.1}}, {"teacher": {"path": "t"}}),
        ({"name": "gspo", "form": "token", "distill": {"coef": 0.1}}, {"teacher": {"path": "t"}}),
        ({"name": "opd", "distill": {"form": "top_k", "reward_weight": 1}}, {"teacher": {"path": "t", "top_k": 8}}),
        ({"name": "decoupled_ppo", "advantage": {"name": "gae"}}, {"critic": {}}),
        ({"name": "grpo", "old_logprobs": "rollout", "correction": {"mode": "none", "opsm": 1e-4}}, {}),
    ],
)  # fmt: skip
def test_combinations_that_make_sense_are_accepted(algorithm, changes):
    assert load(algorithm, **changes).algorithm
