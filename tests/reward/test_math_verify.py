"""The reward for mathematical answers: exact where it can be, bounded where it cannot."""

from __future__ import annotations

import pytest

pytest.importorskip("math_verify", reason="an optional package: pip install math-verify[antlr4_13_2]")

from services.reward.rewards import math_verify


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("so \\boxed{7}", 7, 1),
        ("first \\boxed{5}, no wait, \\boxed{7}", "7", 1),
        ("\\boxed{7} and then \\boxed{", "7", 1),
        ("the answer is 7", "7", 0),
        ("\\boxed{1,000}", "1000", 1),
        ("\\boxed{0.50}", "1/2", 1),
        ("\\boxed{-\\frac{2}{4}}", "-0.5", 1),
        ("\\boxed{0.3333333333}", "\\frac{1}{3}", 0),
        ("\\boxed{$8$.}", "$\\boxed{8}$", 1),
        ("\\boxed{\\text{A}}", "\\text{A}", 1),
        ("\\boxed{" + "(" * 400 + "1" + ")" * 400 + "}", "1", 0),
        ("\\boxed{" + "(" * 60 + "1" + ")" * 60 + "}", "1", 0),
        ("\\boxed{" * 2000 + "1", "1", 0),
    ],
)
def test_settled_without_algebra(
    monkeypatch: pytest.MonkeyPatch, completion: str, answer: object, expected: float
) -> None:
    monkeypatch.setattr(math_verify, "same", None)
    assert math_verify.score(completion, answer) == expected


def test_last_line_when_no_box_is_asked_for() -> None:
    assert math_verify.score("3 + 4\n7", "7", need_box=False) == 1
    assert math_verify.score("", "7", need_box=False) == 0


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("\\boxed{2\\sqrt{2}}", "\\sqrt{8}", 1),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1),
        ("\\boxed{y+1}", "x+1", 0),
        ("\\boxed{\\{3,1,2\\}}", "\\{1,2,3\\}", 1),
        ("\\boxed{(2,1)}", "(1,2)", 0),
        ("\\boxed{\\frac{}{}}", "1", 0),
        ("\\boxed{1/0}", "1", 0),
        ("\\boxed{\\boxed{7}}", "7", 1),
    ],
)
def test_by_algebra(monkeypatch: pytest.MonkeyPatch, completion: str, answer: str, expected: float) -> None:
    monkeypatch.setattr(math_verify, "SECONDS", 300)
    assert math_verify.score(completion, answer) == expected


def test_an_answer_that_never_ends_is_an_error_and_not_a_wrong_answer() -> None:
    with pytest.raises(TimeoutError, match="took longer than 2 s"):
        math_verify.score("\\boxed{9^{9^{9^{9}}}}", "\\sqrt{8}")
