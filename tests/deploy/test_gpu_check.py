"""The prepared GPU check works as far as a CPU can tell: every check in one process, with tiny models."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy/gpu/check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_rehearsal_of_every_check(script: ModuleType, tmp_path: Path) -> None:
    for name, check in script.CHECKS.items():
        found = check(tmp_path, "cpu")
        assert isinstance(found, dict), name
    assert script.bfloat16_parity(tmp_path, "cpu")["logprob_gap"] > 0


def test_a_difference_is_a_failure(script: ModuleType, tmp_path: Path) -> None:
    script.on_cpu(tmp_path, "cpu")
    with pytest.raises(SystemExit, match="differs from the CPU"):
        script.parity(tmp_path, "cpu", "bfloat16", 1e-6)
