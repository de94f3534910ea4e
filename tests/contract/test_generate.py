"""What a prompt becomes: tokens, log-probabilities, reasons; and what is refused."""

from __future__ import annotations

import asyncio

import pytest
import torch

from services.rollout.engines.client import EngineError, EngineTimeout
from tests.contract.conftest import TOLERANCE, Model, Served
from tests.rollout import tiny
from tests.rollout.tiny import PROMPTS, logprobs_of, reference_logprobs
from tests.shared.runs import until

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_greedy_tokens_equal_transformers(engine: Served, a: Model) -> None:
    answers = await engine.sample(PROMPTS, temperature=0, max_new_tokens=24)
    assert [answer["output_ids"] for answer in answers] == [tiny.greedy(a.reference, p, 24) for p in PROMPTS]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_are_those_of_the_scaled_full_softmax(engine: Served, a: Model, temperature: float) -> None:
    answers = await engine.sample(PROMPTS, temperature=temperature, top_p=0.9, max_new_tokens=40)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
        expected = reference_logprobs(a.reference, prompt + answer["output_ids"], temperature)[len(prompt) - 1 :]
        torch.testing.assert_close(logprobs_of(answer), expected, atol=TOLERANCE, rtol=0)


async def test_samples_of_a_prompt_differ_and_come_in_a_list(engine: Served) -> None:
    answers = await engine.sample(PROMPTS[0], n=4, max_new_tokens=20)
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 4
    (alone,) = await engine.sample([PROMPTS[0]], max_new_tokens=2)
    assert len(alone["output_ids"]) == 2


async def test_why_a_sample_ends(engine: Served, a: Model) -> None:
    expected = tiny.greedy(a.reference, PROMPTS[0], 30)
    stop = {"stop_token_ids": [expected[1]], "ignore_eos": False}
    (answer,) = await engine.sample(PROMPTS[0], temperature=0, max_new_tokens=30, **stop)
    assert answer["output_ids"] == expected[:2]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": expected[1]}
    (answer,) = await engine.sample(PROMPTS[0], temperature=0, max_new_tokens=30, ignore_eos=False)
    assert answer["output_ids"] == expected[: expected.index(tiny.EOS) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": tiny.EOS}
    (answer,) = await engine.sample(PROMPTS[0], temperature=0, max_new_tokens=7)
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 7}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 7)
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": 7}]


async def test_given_tokens_are_scored(engine: Served, a: Model) -> None:
    """As the teacher and the reference ask."""
    batch = [PROMPTS[3], PROMPTS[5]]
    answers = await engine.sample(batch, rid=["x/0", "x/1"], start=0, max_new_tokens=0)
    for prompt, answer in zip(batch, answers, strict=True):
        entries = answer["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in entries] == prompt
        assert entries[0][0] is None
        got = torch.tensor([entry[0] for entry in entries[1:]])
        torch.testing.assert_close(got, reference_logprobs(a.reference, prompt), atol=TOLERANCE, rtol=0)
        assert answer["output_ids"] == []


async def test_the_likeliest_tokens_of_given_ones(engine: Served, a: Model) -> None:
    body = {
        "input_ids": [PROMPTS[3]],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": 30,
        "top_logprobs_num": 3,
    }
    (answer,) = await engine.client.generate(body)
    tops = answer["meta_info"]["input_top_logprobs"][-9:]
    logits = a.reference(torch.tensor([PROMPTS[3]])).logits[0, 30:39].log_softmax(-1)
    expected = logits.topk(3)
    assert [[entry[1] for entry in top] for top in tops] == expected.indices.tolist()
    got = torch.tensor([[entry[0] for entry in top] for top in tops])
    torch.testing.assert_close(got, expected.values.detach(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("prompt", [[5, tiny.VOCAB], [5, -1]])
async def test_an_id_that_the_model_does_not_have_is_refused_before_it_is_sent(
    engine: Served, prompt: list[int]
) -> None:
    with pytest.raises(EngineError, match="outside the vocabulary of 96") as caught:
        await engine.sample(prompt, max_new_tokens=2)
    assert caught.value.status == 400
    assert engine.process.alive


@pytest.mark.parametrize("prompt", [[], [5] * (tiny.CONTEXT + 10)])
async def test_a_prompt_that_cannot_be_served_is_refused_and_the_engine_goes_on(
    engine: Served, a: Model, prompt: list[int]
) -> None:
    with pytest.raises(EngineError) as caught:
        await engine.sample(prompt, max_new_tokens=2)
    assert caught.value.status == 400
    assert await engine.greedy(PROMPTS[0]) == tiny.greedy(a.reference, PROMPTS[0], 8)


async def test_a_request_has_a_deadline_and_is_given_up_in_the_engine_too(engine: Served) -> None:
    body = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": engine.forever, "ignore_eos": True}}
    with pytest.raises(EngineTimeout):
        await engine.client.generate(body, timeout_s=0.5)
    await until(engine.idle, "the engine has given it up", 60)


async def test_one_that_comes_later_does_not_wait_for_a_long_one(engine: Served) -> None:
    long = await engine.running([PROMPTS[0]])
    (short,) = await engine.sample(PROMPTS[1], max_new_tokens=3)
    assert len(short["output_ids"]) == 3
    assert not long.done()


async def test_what_an_engine_says_of_itself(engine: Served, a: Model) -> None:
    assert await engine.client.ready()
    assert await engine.client.healthy()
    info = await engine.client.model_info()
    assert info["weight_version"] == "1"
    assert info["architectures"] == ["Qwen3ForCausalLM"]
    server = await engine.client.server_info()
    assert (server["engine"], server["staged_updates"]) == (engine.kind, True)
    assert server["max_total_num_tokens"] > 0
    await asyncio.gather(*[engine.client.load() for _ in range(3)])
