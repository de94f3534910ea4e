"""`placement: colocate` in the run file: what it sets, and what cannot go with it, each with the field and a way out."""

from __future__ import annotations

from typing import Any

import pytest

from shared import config
from shared.config import ConfigError
from shared.metric_names import find
from tests.shared.runs import make_config


def load(**changes: Any) -> config.RunConfig:
    return make_config("colocated", **({"placement": "colocate"} | changes))


def test_it_sets_the_staleness_and_survives_the_round_trip() -> None:
    loaded = load()
    assert (loaded.max_staleness, loaded.slots, loaded.colocated) == (0, 2, True)
    assert config.loads(loaded.dump()) == loaded
    assert load(max_staleness=0) == loaded
    separate = make_config("separate")
    assert (separate.max_staleness, separate.colocated) == (1, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_staleness": 1}, "max_staleness: 1 lets groups of the next update be drawn .*; set it to 0 or remove it"),
        ({"window": 2}, "window: 2 exceeds max_staleness"),
        ({"rollout": {"engine": "external", "url": "http://x"}}, "rollout.engine: .*; use sglang or light"),
        ({"rollout": {"engine": "sglang", "sglang_hooks": False}}, "rollout.sglang_hooks: false .*; remove it"),
        ({"rollout": {"on_new_weights": "in_place"}}, "rollout.on_new_weights: .* 'in_place' has no meaning; remove it"),
        ({"rollout": {"on_new_weights": "abort"}}, "rollout.on_new_weights: .* 'abort' has no meaning"),
        ({"rollout": {"device": "cuda"}, "trainer": {"device": "cpu"}}, "rollout.device: 'cuda', but trainer.device is 'cpu'"),
        ({"controller": {"autoscale": {}}}, "controller.autoscale: .*; remove the section"),
        (
            {"algorithm": {"kl": {"coef": 0.1}}, "reference": {}},
            "placement: the reference's engine would hold the device .*; use reference.place: trainer",
        ),
        (
            {"algorithm": {"name": "opd"}, "teacher": {"path": "t"}},
            "placement: the teacher's engine would hold the device .*; use placement: separate",
        ),
        ({"placement": "together"}, "placement: .*'separate' or 'colocate'"),
        ({"placement": "separate", "dcs": {"cuda_ipc": True}}, "dcs.cuda_ipc: true, but only .*; set placement: colocate"),
        ({"trainer": {"device": "cpu"}, "dcs": {"cuda_ipc": True}}, "dcs.cuda_ipc: .* but trainer.device is 'cpu'"),
        ({"rollout": {"device": "cpu"}, "dcs": {"cuda_ipc": True}}, "dcs.cuda_ipc: .* but rollout.device is 'cpu'"),
    ],
)  # fmt: skip
def test_what_cannot_share_a_device_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"engine": "sglang", "replicas": 2}},
        {"algorithm": {"kl": {"coef": 0.1}}, "reference": {"place": "trainer"}},
        {"trainer": {"device": "cuda", "ranks": 2}, "rollout": {"device": "auto"}},
        {"deterministic": True},
        {"dcs": {"cuda_ipc": True}},
        {"dcs": {"cuda_ipc": True}, "trainer": {"device": "cuda"}, "rollout": {"device": "cuda"}},
    ],
)
def test_what_can_is_accepted(changes: dict[str, Any]) -> None:
    assert load(**changes).colocated


def test_its_metrics_are_declared_for_both_sides() -> None:
    for service in ("trainer", "rollout"):
        for name in ("sleeps_total", "wakes_total", "sleep_s_total", "wake_s_total"):
            found = find(service, name)
            assert found is not None
            assert found.kind == "counter"
