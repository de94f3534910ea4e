"""All scores were 0: a time-out by signal raised outside the main thread, and the exception was swallowed as a wrong answer."""

from __future__ import annotations

import pytest

from services.reward.pool import Pool
from shared.config import parse
from tests.reward.test_pool import ROOT, job, scores

pytest.importorskip("math_verify", reason="an optional package: pip install math-verify[antlr4_13_2]")


async def test_a_right_answer_scores_in_the_pool_as_by_itself() -> None:
    """By algebra, whose alarms need a main thread."""
    data = {"run": "t", "steps": 1, "groups_per_step": 1, "samples_per_group": 2, "base": ROOT}
    data |= {"model": {"path": "m"}, "prompts": {"source": "a.b"}}
    functions = [{"path": "tests.reward.functions.patient"}]
    config = parse(data | {"reward": {"functions": functions, "workers": 1, "timeout_s": 600.0}}, "test")
    async with Pool(config) as pool:
        (found,) = await pool.score(job("\\boxed{2\\sqrt{2}}", "\\boxed{3}", answer="\\sqrt{8}"))
    assert scores(found) == [1.0, 0.0]
