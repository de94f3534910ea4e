"""1 if the completion is the answer, letter by letter.

reward:
  functions:
    - path: services.reward.rewards.exact_match.score
      options: {strip: true, must_end: true}
"""

from __future__ import annotations

from typing import Any


def score(
    completion: str, answer: Any, finish: str, strip: bool = True, ignore_case: bool = False, must_end: bool = False
) -> float:
    """`must_end`: a completion that was cut off at the limit is wrong, whatever it says."""
    if answer is None:
        raise ValueError("the record has no answer to compare with")
    given, right = completion, str(answer)
    if strip:
        given, right = given.strip(), right.strip()
    if ignore_case:
        given, right = given.casefold(), right.casefold()
    return float(given == right and (finish == "stop" or not must_end))
