"""From a prompt group to the engine's request, and from the engine's answers to the group's samples. Pure.

Token in, token out: what the engine returned is copied, never re-tokenised, and every token keeps the version that drew it,
also in a sample that was interrupted and continues from its tokens (`continuation`, `joined`).
An answer that does not add up (lengths, spans, ids) is refused as a whole: `EpisodeError`, which costs the group a delivery.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from shared.records import Group, Samples, Sampling, floats, ints
from shared.tokenizer import Tokenizer

SERVER_ERROR = 500
"""Of an abort: the engine could not go on, for example with logits that are not finite."""


class EpisodeError(RuntimeError):
    """The engine's answer cannot be used. The text says what was wrong with it."""


class Aborted(EpisodeError):
    """Stopped in the middle of a sample, which may not be continued here: nothing is wrong with the group."""


def generate_request(
    group: Group, prompt_ids: list[int], eos_id: int, delivery: str, index: int | None = None
) -> dict[str, Any]:
    """Body of SGLang's POST /generate: for the whole group, one request and n samples; or for sample `index` alone, which is
    then drawn with a seed of its own."""
    sampling: Sampling = group.sampling
    seed = sampling.seed
    if index is not None:
        sampling = replace(sampling, n=1)
        seed = None if seed is None else seed + index
        delivery = f"{delivery}/{index}"
    parameters: dict[str, Any] = {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop_token_ids": [eos_id],
    }
    if sampling.stop:
        parameters["stop"] = sampling.stop
    if seed is not None:
        parameters["sampling_seed"] = seed
    return {
        "rid": f"{group.id}/{delivery}",
        "input_ids": prompt_ids,
        "sampling_params": parameters,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }


def continuation(request: dict[str, Any], part: Samples, attempt: int) -> dict[str, Any]:
    """The request for what is missing of a sample of `request` that was interrupted."""
    parameters = request["sampling_params"] | {"n": 1}
    parameters["max_new_tokens"] -= len(part.ids)
    if (
        "sampling_seed" in parameters
    ):  # positions count from 0 again: with the same seed they would draw the same numbers
        text = f"{parameters['sampling_seed']}/{part.ids.tolist()}"
        parameters["sampling_seed"] = zlib.crc32(text.encode()) >> 1
    changed = {"rid": f"{request['rid']}/+{attempt}", "input_ids": [*request["input_ids"], *part.ids.tolist()]}
    return request | changed | {"sampling_params": parameters}


def joined(part: Samples, rest: Samples, tokenizer: Tokenizer) -> Samples:
    """One sample from an interrupted one and what continued it. Every token keeps the version that drew it."""
    shift = len(part.ids)
    ids = np.concatenate([part.ids, rest.ids])
    moved = {"span_start": rest.span_start + shift, "span_end": rest.span_end + shift}
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name), moved.get(name, getattr(rest, name))])
        for name in ("logprobs", "mask", "span_sample", "span_start", "span_end", "span_version", "span_step")
    }
    return Samples(
        lengths=ints([len(ids)]), ids=ints(ids), finish=rest.finish, texts=[tokenizer.decode(ids.tolist())], **columns
    )


def collect(
    answers: list[dict[str, Any]], expected: int, tokenizer: Tokenizer, step_of: Callable[[int], int]
) -> Samples:
    """The samples in the engine's answers; an interrupted one has finish `abort`. `step_of` gives the step of a version;
    KeyError from it refuses the answer."""
    if len(answers) != expected:
        raise EpisodeError(f"asked for {expected} samples, the engine answered {len(answers)}")
    ids: list[list[int]] = []
    logprobs: list[list[float]] = []
    finish: list[str] = []
    spans: list[tuple[int, int, int, int, int]] = []
    for number, answer in enumerate(answers):
        meta = answer["meta_info"]
        kind = meta["finish_reason"]["type"]
        if kind == "abort" and meta["finish_reason"].get("status_code") == SERVER_ERROR:
            raise EpisodeError(f"sample {number}: the engine could not go on: {meta['finish_reason'].get('message')}")
        tokens = [int(entry[1]) for entry in meta["output_token_logprobs"]]
        if tokens != list(answer["output_ids"]):
            raise EpisodeError(f"sample {number}: output_ids and output_token_logprobs name different tokens")
        ids.append(tokens)
        logprobs.append(
            [float("nan") if entry[0] is None else float(entry[0]) for entry in meta["output_token_logprobs"]]
        )
        finish.append(kind)
        for span in meta["weight_versions"]:
            version = int(span["version"])
            spans.append((number, int(span["start"]), int(span["end"]), version, _step(step_of, version)))
    columns = np.asarray(spans, dtype="<i4").reshape(-1, 5)
    total = sum(len(tokens) for tokens in ids)
    try:
        return Samples(
            lengths=ints([len(tokens) for tokens in ids]),
            ids=ints([token for tokens in ids for token in tokens]),
            logprobs=floats([value for values in logprobs for value in values]),
            mask=np.ones(total, dtype="|u1"),
            finish=finish,
            texts=[tokenizer.decode(tokens) for tokens in ids],
            span_sample=columns[:, 0].copy(),
            span_start=columns[:, 1].copy(),
            span_end=columns[:, 2].copy(),
            span_version=columns[:, 3].copy(),
            span_step=columns[:, 4].copy(),
        )
    except ValueError as error:
        raise EpisodeError(f"the engine's answer does not add up: {error}") from error


def _step(step_of: Callable[[int], int], version: int) -> int:
    try:
        return step_of(version)
    except KeyError as error:
        raise EpisodeError(f"the engine sampled under version {version}, which this replica never verified") from error
