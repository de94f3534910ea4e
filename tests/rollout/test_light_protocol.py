"""What a /generate body may hold, and in which words it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from services.rollout.engines.light.protocol import BadRequest, Limits, Sequence, answer, parse_generate
from services.rollout.engines.light.sampling import SamplingParams

LIMITS = Limits(vocab=100, context_length=50, max_total_tokens=64, eos_ids=frozenset({2}))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "expected a JSON object"),
        ({}, "input_ids: a non-empty list"),
        ({"input_ids": []}, "input_ids: a non-empty list"),
        ({"input_ids": [[1], []]}, "every prompt must be a non-empty list"),
        ({"input_ids": [1, "a"]}, "whole numbers"),
        ({"input_ids": [1, True]}, "whole numbers"),
        ({"input_ids": [1, 100]}, "id 100 is outside the vocabulary of 100"),
        ({"input_ids": [1, -1]}, "id -1 is outside"),
        ({"input_ids": [1] * 40, "sampling_params": {"max_new_tokens": 20}}, "60, more than the context length of 50"),
        ({"input_ids": [1], "text": "hello"}, "text: not supported"),
        ({"input_ids": [1], "stream": True}, "stream: not supported"),
        ({"input_ids": [1], "inputs": 3}, "inputs: unknown field"),
        ({"input_ids": [[1], [2]], "rid": "one"}, "rid: each prompt of a batch needs its own"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid: 1 given for 2 prompts"),
        ({"input_ids": [1], "return_logprob": 3}, "return_logprob: expected bool"),
        (
            {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}, "logprob_start_len": 2},
            "logprob_start_len: 2 is not in -1..1",
        ),
        (
            {"input_ids": [1, 2], "top_logprobs_num": 3, "sampling_params": {"max_new_tokens": 1}},
            "top_logprobs_num: the light engine gives the likeliest tokens of a prompt",
        ),
        (
            {"input_ids": [1, 2], "top_logprobs_num": 101, "sampling_params": {"max_new_tokens": 1}},
            "top_logprobs_num: 101 is not in 0..100",
        ),
        ({"input_ids": [1], "sampling_params": {"stop": ["x"]}}, "stop: not supported"),
        ({"input_ids": [1], "sampling_params": {"heat": 1}}, "heat: unknown field of sampling_params"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature: -1 is not in 0"),
        ({"input_ids": [1], "sampling_params": {"temperature": float("nan")}}, "temperature: nan is not in"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p: 0 is not in"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 1.5}}, "max_new_tokens: expected a number"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "n: 0 is not in"),
        ({"input_ids": [1], "sampling_params": {"stop_token_ids": ["a"]}}, "stop_token_ids: expected a list"),
        ({"input_ids": [1], "sampling_params": {"sampling_seed": "a"}}, "sampling_seed: expected a whole number"),
        ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "sampling_params: 1 given for 2 prompts"),
    ],
)
def test_a_wrong_body_is_refused_with_its_field(body: Any, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        parse_generate(body, LIMITS)


def test_what_can_never_fit_the_cache_is_refused() -> None:
    limits = Limits(vocab=100, context_length=500, max_total_tokens=64, eos_ids=frozenset())
    with pytest.raises(BadRequest, match="can never fit the KV cache of 64; raise --max-total-tokens"):
        parse_generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 64}}, limits)


def test_samples_of_a_prompt_share_it_and_differ_in_their_stream() -> None:
    body = {
        "input_ids": [[1, 2], [3]],
        "sampling_params": {"n": 3, "sampling_seed": 5, "max_new_tokens": 4},
        "rid": ["a", "b"],
    }
    request = parse_generate(body, LIMITS)
    assert request.as_list
    assert [s.rid for s in request.sequences] == ["a"] * 3 + ["b"] * 3
    assert request.sequences[0].prompt is request.sequences[2].prompt
    keys = [s.key for s in request.sequences]
    assert len(set(keys[:3])) == 3
    assert keys[:3] == keys[3:]  # the seed and the sample's index alone make the stream


def test_one_sample_answers_one_object_and_a_batch_of_one_a_list() -> None:
    assert not parse_generate({"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}, LIMITS).as_list
    assert parse_generate({"input_ids": [[1]], "sampling_params": {"max_new_tokens": 1}}, LIMITS).as_list


def test_end_of_sequence_ids_stop_unless_ignored() -> None:
    def stops(**sampling: Any) -> frozenset[int]:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1} | sampling}
        return parse_generate(body, LIMITS).sequences[0].params.stop_ids

    assert stops() == {2}
    assert stops(stop_token_ids=[7]) == {2, 7}
    assert stops(stop_token_ids=[7], ignore_eos=True) == frozenset()  # SGLang's way


def test_spans_are_never_empty_and_cover_the_output() -> None:
    sequence = Sequence("r", [1], SamplingParams(), key=0, return_logprob=False, score_from=None)
    sequence.begin_span("a")
    sequence.begin_span("b")  # switched before a token came
    sequence.output += [5, 6]
    sequence.begin_span("b")
    sequence.output += [7]
    sequence.begin_span("c")
    meta = answer(sequence, "c", 0.0)["meta_info"]
    assert meta["weight_versions"] == [{"version": "b", "start": 0, "end": 3}]
    assert meta["weight_version"] == "b"
    sequence.output += [8]
    meta = answer(sequence, "d", 0.0)["meta_info"]
    assert meta["weight_versions"] == [{"version": "b", "start": 0, "end": 3}, {"version": "c", "start": 3, "end": 4}]
