"""What a reward function may ask for and may return."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from services.reward.scoring import CONTEXT, FunctionError, inspected, load, score
from tests.reward import functions

SAMPLE: dict[str, Any] = {name: name for name in CONTEXT} | {"completion_ids": [1, 2], "prompt_ids": [3]}
SAMPLE |= {"meta": {"level": 5}, "index": 2, "finish": "stop"}


def test_it_is_given_what_it_names_and_no_more() -> None:
    scorer = inspected(functions.sees, {"bonus": 0.5}, "here")
    assert score(scorer, SAMPLE).score == 0.5 + 5 + 2 + 10 + 200 + 1000
    assert scorer.needs == ("finish", "completion_ids", "prompt_ids", "meta", "index")
    assert inspected(functions.right, {}, "here").needs == ("completion", "answer")


def test_keywords_take_everything_but_the_options() -> None:
    scorer = inspected(functions.everything, {"extra": 1}, "here")
    assert set(scorer.needs) == set(CONTEXT) - {"options"}
    assert score(scorer, SAMPLE).score == len(CONTEXT) - 1 - 3 + 1
    assert score(inspected(functions.by_options, {"bonus": 3}, "here"), SAMPLE).score == 3


def test_partials_are_functions_too() -> None:
    assert score(inspected(functools.partial(functions.sees, bonus=1.0), {}, "here"), SAMPLE).score == 1218


@pytest.mark.parametrize(
    ("function", "options", "told"),
    [
        (functions.wants_more, {}, "here: asks for 'tools', which is neither an option nor one of prompt, completion"),
        (
            functions.right,
            {"bonus": 1},
            "here: does not take the option 'bonus'; its parameters are completion, answer",
        ),
        (functions.right, {"answer": 1}, "here: the option 'answer' has the name of something that every reward"),
    ],
)
def test_signatures_that_cannot_be_served(function: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(FunctionError, match=told):
        inspected(function, options, "here")
    assert inspected(functions.wants_more, {"tools": []}, "here").options == {"tools": []}


def test_paths_that_lead_nowhere() -> None:
    for path in ("no_such_module.reward", "tests.reward.functions.nothing"):
        with pytest.raises(FunctionError, match=r"f\[0\]\.path: cannot import"):
            load(path, {}, ".", "f[0]")
    with pytest.raises(FunctionError, match=r"f\[0\]\.path: 'reward' is no dotted path; write module.function"):
        load("reward", {}, ".", "f[0]")
    with pytest.raises(FunctionError, match="is not a function"):
        load("tests.reward.functions.np", {}, ".", "f[0]")


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("bool", 1.0),
        ("numpy", 0.5),
        ("int", 2.0),
        ("nan", ("not_finite", "returned nan")),
        ("inf", ("not_finite", "returned -inf")),
        ("huge", ("not_finite", "returned inf")),
        ("big", ("not_finite", "returned 1e+300")),
        ("none", ("not_a_number", "returned NoneType None")),
        ("text", ("not_a_number", "returned str '1.0'")),
        ("list", ("not_a_number", "returned list [1.0]")),
        ("raise", ("raised", "raised ValueError: no good ?")),
        ("exit", ("raised", "raised SystemExit: 3")),
        ("unknown", ("raised", "raised KeyError: 'unknown'")),
    ],
)
def test_what_is_a_score(completion: str, expected: Any) -> None:
    outcome = score(inspected(functions.acts, {}, "here"), {"completion": completion})
    if isinstance(expected, float):
        assert (outcome.score, outcome.kind, outcome.error) == (expected, "", "")
    else:
        assert outcome.score is None
        assert outcome.kind == expected[0]
        assert outcome.error.startswith(expected[1])
