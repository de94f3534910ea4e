"""Continuous batching: what a request gets does not depend on what runs beside it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.rollout import tiny
from tests.rollout.tiny import FOREVER, PROMPTS, logprobs_of, reference_logprobs, until


def ids(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def samples(answers: list[dict[str, Any]]) -> list[list[list[Any]]]:
    """Tokens with their log-probabilities, to the last bit."""
    return [answer["meta_info"]["output_token_logprobs"] for answer in answers]


async def test_greedy_tokens_equal_transformers(light, model) -> None:
    answers = await light.sample(PROMPTS, temperature=0, max_new_tokens=24)
    assert ids(answers) == [tiny.greedy(model.reference, prompt, 24) for prompt in PROMPTS]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_equal_teacher_forced_ones(light, model, temperature: float) -> None:
    answers = await light.sample(PROMPTS, temperature=temperature, top_p=0.9, max_new_tokens=40)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = reference_logprobs(model.reference, prompt + answer["output_ids"], temperature)[len(prompt) - 1 :]
        torch.testing.assert_close(logprobs_of(answer), expected, atol=1e-4, rtol=1e-4)


async def test_seeded_samples_do_not_depend_on_the_batch(light, serve, model) -> None:
    """Bit for bit the same alone, all at once, staggered among strangers, and in an engine that runs two at a time."""
    settings = {"n": 2, "sampling_seed": 11, "max_new_tokens": 30}
    alone = [await light.sample(prompt, **settings) for prompt in PROMPTS]
    assert alone[0][0]["output_ids"] != alone[0][1]["output_ids"]

    async def among_strangers(index: int) -> list[dict[str, Any]]:
        stranger = asyncio.create_task(light.sample([7 + index] * (3 + index), n=3, max_new_tokens=5 + 9 * index))
        start = light.generated()
        await until(lambda: light.generated() > start)
        mine = await light.sample(PROMPTS[index], **settings)
        await stranger
        return mine

    batched = await light.sample(PROMPTS, **settings)
    mixed = await asyncio.gather(*[among_strangers(index) for index in range(len(PROMPTS))])
    narrow = await serve(model.folder, "--max-running-requests", "2", "--max-prefill-tokens", "16")
    squeezed = await asyncio.gather(*[narrow.sample(prompt, **settings) for prompt in PROMPTS])
    expected = [samples(answers) for answers in alone]
    assert [samples(batched[2 * i : 2 * i + 2]) for i in range(len(PROMPTS))] == expected
    assert [samples(answers) for answers in mixed] == expected
    assert [samples(answers) for answers in squeezed] == expected


async def test_unseeded_samples_differ(light) -> None:
    first, second = await light.sample([PROMPTS[0], PROMPTS[0]], max_new_tokens=20)
    assert first["output_ids"] != second["output_ids"]


async def test_a_request_is_admitted_while_another_decodes(light) -> None:
    long = asyncio.create_task(light.sample(PROMPTS[0], max_new_tokens=FOREVER))
    await until(lambda: light.generated() > 5)
    (short,) = await light.sample(PROMPTS[1], max_new_tokens=3)
    assert len(short["output_ids"]) == 3
    assert not long.done()
    await light.client.abort(everything=True)
    (aborted,) = await long
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"


async def test_one_prefill_serves_all_samples_of_a_prompt(light) -> None:
    answers = await light.sample(PROMPTS[3], n=4, max_new_tokens=2)
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0, 40, 40, 40]


async def test_a_full_cache_makes_requests_wait_and_rows_grow_and_shrink(serve, model, monkeypatch) -> None:
    light = await serve(model.folder, "--max-total-tokens", "256")
    scheduler, step, most_waiting = light.engine.scheduler, light.engine.model.hidden, 0

    def watched(*arguments: Any) -> torch.Tensor:
        nonlocal most_waiting
        most_waiting = max(most_waiting, len(scheduler.waiting))
        return step(*arguments)

    monkeypatch.setattr(light.engine.model, "hidden", watched)
    await light.client.pause("in_place")
    sizes = [20, 150, 5, 200, 90, 10, 60, 240]
    prompts = [[3 + index] * 4 for index in range(len(sizes))]
    requests = [
        asyncio.create_task(light.sample(prompt, temperature=0, max_new_tokens=size))
        for prompt, size in zip(prompts, sizes, strict=True)
    ]
    await until(lambda: len(scheduler.waiting) == len(sizes))
    await light.client.resume()
    for request, prompt, size in zip(requests, prompts, sizes, strict=True):
        assert (await request)[0]["output_ids"] == tiny.greedy(model.reference, prompt, size)
    assert most_waiting > 0


async def test_stopping(light, model) -> None:
    expected = tiny.greedy(model.reference, PROMPTS[0], 30)
    (answer,) = await light.sample(
        PROMPTS[0], temperature=0, max_new_tokens=30, stop_token_ids=[expected[1]], ignore_eos=False
    )
    assert answer["output_ids"] == expected[:2]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": expected[1]}
    (answer,) = await light.sample(PROMPTS[0], temperature=0, max_new_tokens=30, ignore_eos=False)
    assert answer["output_ids"] == expected[: expected.index(tiny.EOS) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": tiny.EOS}
    (answer,) = await light.sample(PROMPTS[0], temperature=0, max_new_tokens=7)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 7}
    assert answer["meta_info"]["completion_tokens"] == 7
    assert answer["meta_info"]["prompt_tokens"] == 5


async def test_prompt_scoring(light, model) -> None:
    answers = await light.sample([PROMPTS[3], PROMPTS[4]], start=0, max_new_tokens=0)
    for prompt, answer in zip((PROMPTS[3], PROMPTS[4]), answers, strict=True):
        entries = answer["meta_info"]["input_token_logprobs"]
        assert answer["output_ids"] == []
        assert entries[0] == [None, prompt[0], None]
        assert [entry[1] for entry in entries] == prompt
        got = torch.tensor([entry[0] for entry in entries[1:]])
        torch.testing.assert_close(got, reference_logprobs(model.reference, prompt), atol=1e-4, rtol=1e-4)
    (answer,) = await light.sample(PROMPTS[3], start=30, max_new_tokens=1)
    entries = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in entries] == PROMPTS[3][30:]
    expected = reference_logprobs(model.reference, PROMPTS[3])[30:]
    torch.testing.assert_close(torch.tensor([entry[0] for entry in entries[1:]]), expected, atol=1e-4, rtol=1e-4)


async def test_broken_weights_end_a_request_in_words_and_do_not_linger(light, model) -> None:
    name = "model.norm.weight"
    parameter = light.engine.model.parameters[name]
    good = parameter.read()

    def write(tensor: torch.Tensor, version: str) -> Any:
        return light.engine.scheduler.call(
            lambda: light.engine.scheduler.switch(lambda: parameter.write(tensor), version, None)
        )

    await asyncio.wrap_future(write(torch.full_like(good, float("nan")), "bad"))
    (answer,) = await light.sample(PROMPTS[0], max_new_tokens=5)
    assert answer["output_ids"] == []
    assert "not finite under weight version bad" in answer["meta_info"]["finish_reason"]["message"]
    await asyncio.wrap_future(write(good, "good"))
    (answer,) = await light.sample(PROMPTS[0], temperature=0, max_new_tokens=9)
    assert answer["output_ids"] == tiny.greedy(model.reference, PROMPTS[0], 9)
