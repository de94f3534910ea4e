"""The bodies of `/generate`, as SGLang spells them: what comes in, checked, and what goes out.

Guarantees: a request is refused as a whole, with the field and the fix, before it reaches the scheduler; an id outside the
vocabulary is refused too (SGLang's own server dies of one). A field or sampling option that the light engine does not have is
refused unless it holds its neutral value. tests/rollout/test_light_protocol.py holds the refusals.

Kept from SGLang, traps included: `ignore_eos` also switches `stop_token_ids` off; `max_new_tokens` 0 scores the prompt; prompt
log-probabilities are unscaled, and the first one is null; a batch or n > 1 answers a list, else one object.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from services.rollout.engines.fields import BadRequest
from services.rollout.engines.light.sampling import SamplingParams, stream_key

KNOWN_FIELDS = {"input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num"}
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "stream": (None, False),
    "text": (None,),
    "token_ids_logprob": (None, []),
    "return_text_in_logprobs": (None, False),
    "return_hidden_states": (None, False),
    "return_routed_experts": (None, False),
    "lora_path": (None,),
    "image_data": (None, []),
    "video_data": (None, []),
    "audio_data": (None, []),
}
NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "min_new_tokens": (None, 0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "logit_bias": (None, {}),
    "no_stop_trim": (None, False, True),
    "skip_special_tokens": (None, False, True),
    "spaces_between_special_tokens": (None, False, True),
}


@dataclass(frozen=True, slots=True)
class Limits:
    vocab: int
    context_length: int
    max_total_tokens: int
    eos_ids: frozenset[int]


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample on its way. The scheduler's thread alone changes it between submission and finish."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    key: int
    return_logprob: bool
    score_from: int | None
    """First prompt position whose log-probability is wanted; None: none are."""
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    top_k: int = 0
    """Likeliest tokens that are wanted at each scored position of the prompt."""
    prompt_tops: list[list[tuple[float, int]]] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    """(version, first output index sampled under it), in order."""
    retractions: int = 0
    cached_tokens: int = 0
    finish: dict[str, Any] | None = None

    @property
    def need(self) -> int:
        """Tokens of KV cache that it can come to need."""
        return len(self.prompt) + self.params.max_new_tokens

    def begin_span(self, version: str) -> None:
        """What is sampled from here on is sampled under `version`."""
        if self.spans and self.spans[-1][1] == len(self.output):
            self.spans.pop()
        if not self.spans or self.spans[-1][0] != version:
            self.spans.append((version, len(self.output)))


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    sequences: list[Sequence]
    as_list: bool


def parse_generate(body: Any, limits: Limits) -> GenerateRequest:
    """The sequences of a `/generate` body. Raises BadRequest."""
    body = _fields(body, "body", KNOWN_FIELDS, NEUTRAL_FIELDS)
    prompts, is_batch = _prompts(body.get("input_ids"))
    for prompt in prompts:
        _check_prompt(prompt, limits)
    count = len(prompts)
    rids = _each(body.get("rid"), "rid", count, str)
    raw_params = body.get("sampling_params") or {}
    params = [parse_sampling(p, limits) for p in (raw_params if isinstance(raw_params, list) else [raw_params] * count)]
    if len(params) != count:
        raise BadRequest(f"sampling_params: {len(params)} given for {count} prompts")
    logprob = _each(body.get("return_logprob"), "return_logprob", count, bool)
    starts = _each(body.get("logprob_start_len"), "logprob_start_len", count, int)
    tops = _each(body.get("top_logprobs_num"), "top_logprobs_num", count, int)
    sequences: list[Sequence] = []
    for i, prompt in enumerate(prompts):
        samples = _samples(prompt, params[i], rids[i], bool(logprob[i]), starts[i], limits)
        if tops[i]:
            _want_tops(samples, tops[i], limits)
        sequences += samples
    return GenerateRequest(sequences, as_list=is_batch or len(sequences) > 1)


def _fields(value: Any, where: str, known: set[str], neutral: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{where}: expected a JSON object, got {type(value).__name__}")
    for name, given in value.items():
        if name in known or (name in neutral and given in neutral[name]):
            continue
        if name in neutral:
            raise BadRequest(
                f"{name}: not supported by the light engine (only {neutral[name][-1]!r}); use engine: sglang"
            )
        raise BadRequest(f"{name}: unknown field of {where}; known are {', '.join(sorted(known))}")
    return value


def _prompts(input_ids: Any) -> tuple[list[list[int]], bool]:
    if not isinstance(input_ids, list) or not input_ids:
        raise BadRequest(
            "input_ids: a non-empty list of token ids, or of such lists, is needed (the light engine takes no text)"
        )
    is_batch = isinstance(input_ids[0], list)
    return (input_ids if is_batch else [input_ids]), is_batch


def _check_prompt(prompt: Any, limits: Limits) -> None:
    if not isinstance(prompt, list) or not prompt:
        raise BadRequest("input_ids: every prompt must be a non-empty list of token ids")
    if not all(type(token) is int for token in prompt):
        raise BadRequest("input_ids: token ids must be whole numbers")
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= limits.vocab:
        wrong = low if low < 0 else high
        raise BadRequest(
            f"input_ids: id {wrong} is outside the vocabulary of {limits.vocab}; was another tokenizer used?"
        )


def _each(value: Any, name: str, count: int, kind: type) -> list[Any]:
    """One value a prompt: a list as it is, a single one repeated (a single rid only fits a single prompt)."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise BadRequest(f"{name}: {len(values)} given for {count} prompts")
    if any(item is not None and type(item) is not kind for item in values):
        raise BadRequest(f"{name}: expected {kind.__name__}")
    if kind is str and value is not None and len(set(values)) != count:
        raise BadRequest(f"{name}: each prompt of a batch needs its own")
    return values


def _samples(
    prompt: list[int], params: SamplingParams, rid: str | None, logprob: bool, start: int | None, limits: Limits
) -> list[Sequence]:
    total = len(prompt) + params.max_new_tokens
    if total > limits.context_length:
        raise BadRequest(
            f"input_ids: {len(prompt)} tokens and max_new_tokens {params.max_new_tokens} make {total}, more than the context "
            f"length of {limits.context_length}; shorten one of them or start the engine with a larger --context-length"
        )
    if total > limits.max_total_tokens:
        raise BadRequest(
            f"input_ids: {total} tokens can never fit the KV cache of {limits.max_total_tokens}; raise --max-total-tokens"
        )
    if start is not None and not -1 <= start < len(prompt):
        raise BadRequest(f"logprob_start_len: {start} is not in -1..{len(prompt) - 1}")
    score_from = start if logprob and start is not None and start >= 0 else None
    seed = params.seed if params.seed is not None else secrets.randbits(64)
    rid = rid or secrets.token_hex(16)
    # The n samples share one prompt object: that is how the scheduler knows that one prefill serves them all.
    return [Sequence(rid, prompt, params, stream_key(seed, index), logprob, score_from) for index in range(params.n)]


def _want_tops(samples: list[Sequence], top_k: int, limits: Limits) -> None:
    if not 0 < top_k <= limits.vocab:
        raise BadRequest(f"top_logprobs_num: {top_k} is not in 0..{limits.vocab}")
    if samples[0].score_from is None or samples[0].params.max_new_tokens > 0:
        raise BadRequest(
            "top_logprobs_num: the light engine gives the likeliest tokens of a prompt only; set max_new_tokens: 0, "
            "return_logprob: true and logprob_start_len"
        )
    for sample in samples:
        sample.top_k = top_k


def parse_sampling(raw: Any, limits: Limits) -> SamplingParams:
    """SGLang's `sampling_params`. Raises BadRequest."""
    known = {
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "stop_token_ids",
        "ignore_eos",
        "n",
        "sampling_seed",
    }
    raw = _fields(raw, "sampling_params", known, NEUTRAL_SAMPLING)
    ignore_eos = bool(raw.get("ignore_eos", False))
    stop_ids = raw.get("stop_token_ids") or []
    if not isinstance(stop_ids, list) or not all(type(token) is int for token in stop_ids):
        raise BadRequest("stop_token_ids: expected a list of token ids")
    seed = raw.get("sampling_seed")
    if seed is not None and type(seed) is not int:
        raise BadRequest("sampling_seed: expected a whole number")
    return SamplingParams(
        max_new_tokens=_within(raw, "max_new_tokens", 128, int, 0, None),
        temperature=_within(raw, "temperature", 1.0, float, 0.0, None),
        top_p=_within(raw, "top_p", 1.0, float, 1e-9, 1.0),
        top_k=_within(raw, "top_k", -1, int, -1, None),
        min_p=_within(raw, "min_p", 0.0, float, 0.0, 1.0),
        n=_within(raw, "n", 1, int, 1, 4096),
        stop_ids=frozenset() if ignore_eos else limits.eos_ids | frozenset(stop_ids),
        seed=seed,
    )


def _within(raw: dict[str, Any], name: str, default: Any, kind: type, low: float, high: float | None) -> Any:
    value = raw.get(name)
    if value is None:
        return default
    if type(value) is bool or not isinstance(value, (int, float) if kind is float else int):
        raise BadRequest(f"sampling_params.{name}: expected a number, got {value!r}")
    if not (value >= low and (high is None or value <= high)):
        raise BadRequest(f"sampling_params.{name}: {value} is not in {low}..{'' if high is None else high}")
    return kind(value)


def answer(sequence: Sequence, version: str, seconds: float) -> dict[str, Any]:
    """SGLang's answer for one finished sample."""
    starts = [start for _, start in sequence.spans[1:]] + [len(sequence.output)]
    spans = (
        [
            {"version": span_version, "start": start, "end": end}
            for (span_version, start), end in zip(sequence.spans, starts, strict=True)
            if end > start
        ]
        if sequence.spans
        else []
    )
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": sequence.finish,
        "prompt_tokens": len(sequence.prompt),
        "completion_tokens": len(sequence.output),
        "cached_tokens": sequence.cached_tokens,
        "weight_version": spans[-1]["version"] if spans else version,
        "weight_versions": spans,
        "num_retractions": sequence.retractions,
        "e2e_latency": seconds,
    }
    if sequence.return_logprob:
        pairs = zip(sequence.logprobs, sequence.output, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        meta["output_token_logprobs_length"] = len(sequence.output)
        meta["input_token_logprobs"] = _prompt_logprobs(sequence)
        if sequence.top_k:
            tops = [[[logprob, token, None] for logprob, token in top] for top in sequence.prompt_tops]
            meta["input_top_logprobs"] = [None, *tops]
    return {"output_ids": sequence.output, "meta_info": meta}


def _prompt_logprobs(sequence: Sequence) -> list[list[Any]]:
    if sequence.score_from is None:
        return []
    tokens = sequence.prompt[sequence.score_from :]
    # An aborted request may not have been scored: then its list ends early.
    logprobs: list[float | None] = [None, *sequence.prompt_logprobs]
    return [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=False)]
