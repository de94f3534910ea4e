"""1 if the last \\boxed{...} of the completion equals the answer mathematically. Needs the package math-verify.

    reward:
      functions:
        - path: services.reward.rewards.math_verify.score

Most answers are settled by comparing strings and plain numbers, exactly; only the rest reaches the computer algebra, which can
be made to run for ever. So an answer that is longer than LONGEST or nested deeper than DEEPEST is wrong, the library has SECONDS
for each of its two steps, and running out of them is an error (TimeoutError), not a wrong answer: on a loaded machine right ones
run out too. Its alarms work because scoring processes call on their main thread. `tests/reward/test_rewards.py`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import parse, verify
from math_verify.errors import TimeoutException

LONGEST = 300
DEEPEST = 8
SECONDS = 2

BRACE = re.compile(r"\\boxed\{|[{}]")
NUMBER = re.compile(r"[+-]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?")
RATIO = re.compile(r"([+-]?\d+)/(\d+)|([+-]?)\\[dt]?frac\{(\d+)\}\{(\d+)\}")


def score(completion: str, answer: Any, need_box: bool = True) -> float:
    """`need_box: false` takes the last line of a completion that has no box."""
    if answer is None:
        raise ValueError("the record has no answer to compare with")
    right = bare(last_box(str(answer)) or str(answer))
    given = last_box(completion)
    if given is None and not need_box and completion.strip():
        given = completion.strip().splitlines()[-1]
    if given is None:
        return 0.0
    given = bare(given)
    if given == right:
        return 1.0
    if len(given) > LONGEST or depth(given) > DEEPEST:
        return 0.0
    numbers = plain_number(given), plain_number(right)
    if None not in numbers:
        return float(numbers[0] == numbers[1])
    return float(same(right, given))


def last_box(text: str) -> str | None:
    """What the last complete \\boxed{...} holds. One pass, however many are opened."""
    opened: list[int] = []
    found = None
    for match in BRACE.finditer(text):
        if match[0] != "}":
            opened.append(match.end() if match[0] != "{" else -1)
        elif opened and (start := opened.pop()) >= 0 and (found is None or start > found[0]):
            found = start, match.start()
    return text[found[0] : found[1]] if found else None


def bare(text: str) -> str:
    """Without what surrounds an answer and does not belong to it."""
    return text.strip().removesuffix(".").strip().strip("$").strip()


def depth(text: str) -> int:
    """How deep brackets and fractions are nested at most."""
    level = deepest = 0
    for letter in text:
        level += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, level)
    return deepest


def plain_number(text: str) -> Fraction | None:
    """Integers, decimals, thousands separators, and fractions of integers."""
    text = text.replace(" ", "")
    if NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if (match := RATIO.fullmatch(text)) is None:
        return None
    over, under = (match[1], match[2]) if match[1] else (match[3] + match[4], match[5])
    return Fraction(int(over), int(under)) if int(under) else None


def same(right: str, given: str) -> bool:
    """By math-verify. Not symmetric: the right answer comes first."""
    try:
        parsed = parse(f"$\\boxed{{{given}}}$", parsing_timeout=SECONDS, raise_on_error=True)
        return bool(verify(_gold(right), parsed, timeout_seconds=SECONDS, raise_on_error=True))
    except TimeoutException as error:
        raise TimeoutError(f"comparing {given!r:.60} took longer than {SECONDS} s") from error
    except Exception:  # noqa: BLE001 - whatever the algebra cannot read or compare is not the answer
        return False


@lru_cache(maxsize=1024)
def _gold(right: str) -> Any:
    return parse(f"$\\boxed{{{right}}}$", parsing_timeout=SECONDS, raise_on_error=True)
