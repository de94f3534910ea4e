"""The run file: what is wrong is refused with the field's path and a hint; what is right survives the KV round trip."""

import pytest
import yaml

from shared import config
from shared.config import ConfigError

RUN = {
    "run": "demo",
    "steps": 4,
    "groups_per_step": 4,
    "samples_per_group": 2,
    "model": {"path": "model"},
    "prompts": {"source": "prompts.jsonl"},
    "reward": {"functions": [{"path": "task.reward"}]},
}


def write(tmp_path, changes=None, text=None):
    path = tmp_path / "run.yaml"
    path.write_text(text if text is not None else yaml.safe_dump({**RUN, **(changes or {})}))
    return path


def test_a_minimal_run_file_loads_and_survives_the_round_trip(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = config.load(write(tmp_path))
    assert config.loads(loaded.dump()) == loaded
    assert loaded.path("model") == tmp_path / "model"
    assert loaded.work_path == tmp_path / "runs/demo"
    assert loaded.slots == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stpes": 3}, "stpes: unknown field; did you mean 'steps'?"),
        (
            {"trainer": {"optimizer": {"learning_rate": 1}}},
            "trainer.optimizer.learning_rate: unknown field; known are lr",
        ),
        ({"steps": "many"}, "steps: Input should be a valid integer"),
        ({"steps": 0}, "steps: Input should be greater than or equal to 1"),
        ({"run": "a.b"}, "run: run name 'a.b': use letters"),
        ({"window": 6, "max_staleness": 1}, r"window: 6 exceeds max_staleness \* groups_per_step \+ 1 = 5"),
        ({"window": 2, "max_staleness": 0}, "window: 2 exceeds"),
        ({"model": {}}, "model.path: missing"),
        ({"reward": {"functions": []}}, "reward.functions: List should have at least 1 item"),
        ({"reward": {"functions": [{"path": "a.b", "wieght": 1}]}}, "wieght: unknown field; did you mean 'weight'"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p: Input should be greater than or equal to 1"),
        (
            {"sampling": {"max_new_tokens": 9000}},
            "trainer.micro_batch_tokens: 8192 is less than",
        ),
        ({"rollout": {"sglang": {"tp": 2}}}, "rollout.sglang: options given, but rollout.engine is 'light'"),
        ({"eval": {"min_reward": 0.1}}, "eval.min_reward: needs eval.prompts"),
    ],
)
def test_a_wrong_field_is_named_with_a_hint(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        config.load(write(tmp_path, changes))


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "not YAML"), ("- 1", "expected fields at the top level"), ("", "expected fields")]
)
def test_a_file_that_is_no_run_file_says_so(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        config.load(write(tmp_path, text=text))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the run file"):
        config.load(tmp_path / "none.yaml")


def test_overrides_reach_nested_fields_and_read_numbers(tmp_path):
    loaded = config.load(write(tmp_path), ["trainer.optimizer.lr=1e-4", "steps=9", "eval.min_reward=null"])
    assert loaded.trainer.optimizer.lr == pytest.approx(1e-4)
    assert loaded.steps == 9


@pytest.mark.parametrize("override", ["steps", "=3", "run.x=3"])
def test_a_wrong_override_says_how_to_write_it(tmp_path, override):
    with pytest.raises(ConfigError, match="--set"):
        config.load(write(tmp_path), [override])


def test_a_plug_in_that_cannot_be_imported_names_its_field(tmp_path):
    (tmp_path / "plug_in_of_test.py").write_text("value = 3\ndef reward():\n    return 1.0\n")
    (tmp_path / "broken_plug_in.py").write_text("raise RuntimeError('boom')\n")
    loaded = config.load(write(tmp_path))
    assert loaded.function("plug_in_of_test.reward", "reward.path")() == 1.0
    for dotted, message in [
        ("plug_in_of_test.rewrad", "reward.path: cannot import"),
        ("no_such_module.reward", "reward.path: cannot import"),
        ("plug_in_of_test.value", "reward.path: 'plug_in_of_test.value' is not a function"),
        ("reward", "write module.function"),
        ("broken_plug_in.reward", "fails while it is imported: RuntimeError: boom"),
    ]:
        with pytest.raises(ConfigError, match=message):
            loaded.function(dotted, "reward.path")


def test_every_field_is_explained():
    def sections(model, path):
        for name, field in model.model_fields.items():
            if not (name == "run" or field.description):
                yield f"{path}{name}"
            for section in config.sections_of(field.annotation):
                yield from sections(section, f"{path}{name}.")

    assert list(sections(config.RunConfig, "")) == []
