"""What a scoring model says about a group's tokens: the engine's request, and the columns in its answer. Pure.

G samples of a group, N completion tokens of all of them, K likeliest tokens at each position.

The engine is asked for no new token, only for the log-probabilities of the given ones (SGLang's `logprob_start_len`). An answer
that does not hold exactly the group's tokens is refused as a whole (`ScoreError`): no column is ever made up.
`tests/rollout/test_stage.py`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from shared.records import Group, floats, ints


class ScoreError(RuntimeError):
    """The engine's answer cannot be used. The text says what was wrong with it."""


def score_request(group: Group, top_k: int, rid: str) -> dict[str, Any] | None:
    """Body of POST /generate; None if the group has no token. Empty samples are left out."""
    prompt = _prompt(group)
    sequences = [prompt + completion for completion in _completions(group) if completion]
    if not sequences:
        return None
    return {
        "rid": [f"{rid}/{number}" for number in range(len(sequences))],
        "input_ids": sequences,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": len(prompt) - 1,
        "top_logprobs_num": top_k,
        "stream": False,
    }


def score_columns(
    group: Group, answers: list[dict[str, Any]], role: str, top_k: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(columns, id columns): `<role>_logprobs` [N]; with `top_k` `<role>_top_ids` and `<role>_top_logprobs` [N, K] too."""
    completions = [completion for completion in _completions(group) if completion]
    if len(answers) != len(completions):
        raise ScoreError(f"asked for {len(completions)} samples, the engine answered {len(answers)}")
    logprobs: list[float] = []
    top_ids: list[list[int]] = []
    top_logprobs: list[list[float]] = []
    for number, (answer, completion) in enumerate(zip(answers, completions, strict=True)):
        meta = answer["meta_info"]
        entries = meta["input_token_logprobs"][-len(completion) :]
        if [entry[1] for entry in entries] != completion:
            raise ScoreError(f"sample {number}: the engine scored other tokens than it was given")
        logprobs += [_number(entry[0]) for entry in entries]
        if top_k:
            tops = meta["input_top_logprobs"][-len(completion) :]
            if len(tops) != len(completion) or any(top is None or len(top) != top_k for top in tops):
                raise ScoreError(
                    f"sample {number}: the engine did not give the {top_k} likeliest tokens of each position"
                )
            top_ids += [[int(entry[1]) for entry in top] for top in tops]
            top_logprobs += [[_number(entry[0]) for entry in top] for top in tops]
    columns = {f"{role}_logprobs": floats(logprobs)}
    if not top_k:
        return columns, {}
    columns[f"{role}_top_logprobs"] = floats(top_logprobs).reshape(-1, top_k)
    return columns, {f"{role}_top_ids": ints(top_ids).reshape(-1, top_k)}


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _prompt(group: Group) -> list[int]:
    if group.prompt_ids is None or not len(group.prompt_ids):
        raise ScoreError(f"{group.id}: no prompt_ids")
    return group.prompt_ids.tolist()


def _completions(group: Group) -> list[list[int]]:
    if group.samples is None:
        raise ScoreError(f"{group.id}: no samples")
    ids = group.samples.ids.tolist()
    return [ids[start:end] for start, end in itertools.pairwise(group.samples.offsets.tolist())]
