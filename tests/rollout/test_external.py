"""Servers that somebody else runs, named in the run file. How they are attended to: test_elsewhere.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.rollout.elsewhere import url_of
from services.rollout.engines.process import vocabulary
from shared.config import ConfigError
from tests.shared.runs import make_config


@pytest.mark.parametrize(
    ("pattern", "url"),
    [
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://{replica}:30000", "http://rollout-12:30000"),
        ("http://127.0.0.1:300{index}", "http://127.0.0.1:30012"),
    ],
)
def test_each_replica_has_its_own(pattern: str, url: str) -> None:
    assert url_of(pattern, "rollout-12") == url


def test_a_wrong_pattern_is_told() -> None:
    with pytest.raises(ConfigError, match="may hold {replica} and {index} only"):
        url_of("http://{host}", "rollout-1")


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"engine": "external"}, "rollout.url: an external engine needs the address"),
        ({"url": "http://a"}, "rollout.url: an external engine needs the address"),
        ({"engine": "external", "url": "http://a", "replicas": 2}, "2 replicas would share one server"),
        (
            {"on_new_weights": "in_place", "engine": "sglang", "sglang_hooks": False},
            "would keep a cache of old weights",
        ),
        ({"engine": "sglang", "deterministic": True}, "which only the light engine promises"),
        ({"sglang": {"tp_size": 2}}, "options given, but rollout.engine is 'light'"),
    ],
)
def test_what_cannot_work_is_refused(rollout: dict[str, Any], said: str) -> None:
    options = dict(rollout)
    deterministic = options.pop("deterministic", False)
    with pytest.raises(ConfigError, match=said):
        make_config("r", rollout=options, deterministic=deterministic)


def test_the_size_of_the_vocabulary(tmp_path: Path) -> None:
    for config, size in (({"vocab_size": 7}, 7), ({"text_config": {"vocab_size": 8}}, 8), ({}, None)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert vocabulary(tmp_path) == size
