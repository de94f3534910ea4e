"""Calling a user's reward function and judging what it returns. Light: this is what a scoring process imports.

A reward is `reward(prompt, completion, answer, **context) -> float`, sync or async. It is called by keyword with what its
signature names and no more; `CONTEXT` lists what there is. A finite number is a score (True and False are 1 and 0). Anything
else - an exception, NaN, infinity, a string, None - is no score but an error of one of the kinds in `KINDS`, never silently 0.
`tests/reward/test_scoring.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared import awake
from shared.plugins import PluginError, find_function

CONTEXT = {
    "prompt": "the prompt: a string, or a list of chat messages",
    "completion": "the text of this sample, special tokens dropped",
    "answer": "the record's answer, or None",
    "finish": "stop: the policy ended it; length: it was cut off",
    "completion_ids": "this sample's tokens",
    "prompt_ids": "the prompt's tokens",
    "meta": "the record's other fields",
    "group_id": "id of the group",
    "index": "this sample's place in its group, from 0",
    "completions": "the texts of all samples of the group",
    "options": "all options of the run file's entry; by default each is an argument of its own",
}
"""What a reward function may ask for by the name of a parameter."""

SHARED = ("prompt", "answer", "prompt_ids", "meta", "group_id", "completions")
"""Those that are the same for all samples of a group."""

KINDS = ("raised", "not_a_number", "not_finite", "timeout", "died")

LARGEST = 3.4028234e38
"""Scores are kept as 32-bit floats."""


class FunctionError(ValueError):
    """A reward function that cannot be used. The text names the field of the run file."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one call. `kind` is '' for a score."""

    score: float | None
    kind: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Scorer:
    """A reward function that is ready to be called."""

    function: Callable[..., Any]
    options: dict[str, Any]
    needs: tuple[str, ...]
    """Names from CONTEXT that it asks for."""
    is_async: bool

    def __call__(self, sample: dict[str, Any]) -> Any:
        """What the function returns: a value, or a coroutine if it is async."""
        arguments = {name: sample[name] for name in self.needs if name != "options"}
        if "options" in self.needs:
            arguments["options"] = self.options
        else:
            arguments |= self.options
        return self.function(**arguments)


def load(path: str, options: dict[str, Any], base: str, field: str) -> Scorer:
    """The function at a dotted path; modules beside the run file are found too. Raises FunctionError."""
    try:
        function = find_function(path, base, f"{field}.path")
    except PluginError as error:
        raise FunctionError(str(error)) from error
    return inspected(function, options, f"{field}: {path}")


def inspected(function: Callable[..., Any], options: dict[str, Any], where: str) -> Scorer:
    """Check that the signature can be served."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    whole = "options" in named
    for name, parameter in named.items():
        given = name in CONTEXT or (name in options and not whole)
        if not given and parameter.default is parameter.empty:
            raise FunctionError(
                f"{where}: asks for {name!r}, which is neither an option nor one of {', '.join(CONTEXT)}"
            )
    for name in options:
        if not whole and name not in named and not takes_any:
            raise FunctionError(f"{where}: does not take the option {name!r}; its parameters are {', '.join(named)}")
        if not whole and name in CONTEXT:
            raise FunctionError(f"{where}: the option {name!r} has the name of something that every reward is given")
    wanted = CONTEXT if takes_any else named
    needs = tuple(name for name in CONTEXT if name in wanted and (name != "options" or whole))
    return Scorer(function, dict(options), needs, inspect.iscoroutinefunction(inspect.unwrap(function)))


def judged(value: Any) -> Outcome:
    """A score, or why it is none."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        return Outcome(None, "not_a_number", f"returned {type(value).__name__} {value!r:.60}; a reward is a number")
    try:
        score = float(value)
    except OverflowError:
        score = math.inf
    if math.isfinite(score) and abs(score) <= LARGEST:
        return Outcome(score)
    return Outcome(None, "not_finite", f"returned {score}; a reward is a finite 32-bit number")


def raised(error: BaseException) -> Outcome:
    text = str(error)[:300].encode(errors="replace").decode()
    return Outcome(None, "raised", f"raised {type(error).__name__}: {text}")


def timed_out(timeout_s: float) -> Outcome:
    return Outcome(None, "timeout", f"took longer than {timeout_s:g} s (reward.timeout_s)")


def score(scorer: Scorer, sample: dict[str, Any]) -> Outcome:
    """Call a sync function."""
    try:
        return judged(scorer(sample))
    except BaseException as error:  # noqa: BLE001 - a user's code; math-verify's time-out, for one, is no Exception
        return raised(error)


async def score_async(scorer: Scorer, sample: dict[str, Any], timeout_s: float) -> Outcome:
    """Call an async function, within the time."""
    try:
        async with awake.timeout(timeout_s) as limit:
            return judged(await scorer(sample))
    except TimeoutError as error:
        return timed_out(timeout_s) if limit.expired() else raised(error)
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001 - a user's code
        return raised(error)
