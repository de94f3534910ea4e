"""Two tensor-parallel ranks as Ray actors train the example, and its books balance. `make test-ray`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.test_run import DEADLINE_S, EXAMPLE, Example
from tests.e2e.test_trainer_ranks import RANKS, balanced
from tests.tied import tied

pytestmark = pytest.mark.ray


@pytest.fixture
async def example(tmp_path: Path) -> AsyncIterator[Example]:
    example = Example(tmp_path)
    yield example
    await example.close()


async def test_two_tensor_parallel_ranks_in_a_placement_group(example: Example) -> None:
    sets = [*RANKS, "trainer.megatron.tensor_model_parallel_size=2", f"model.path={example.folder}/model"]
    up = await example.starts("tests.e2e.up_with_ranks", str(EXAMPLE), "ray", "2", str(example.report), *sets)
    assert await example.ends(up) == 0, example.text
    balanced(example.report)


def test_no_room_is_said() -> None:
    words = ["--ranks", "2", "--gpus", "7", "--address", "local", "--timeout", "3"]
    service = ["--nats", "nats://127.0.0.1:1", "--run", "none"]
    done = subprocess.run(
        tied(sys.executable, "-m", "services.trainer.ray_ranks", *words, "--", *service),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "the cluster has no room for 2 ranks with 1 CPU, 7 GPU each after 3 s" in done.stderr
