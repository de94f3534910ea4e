"""Ending requests, and holding all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from services.rollout.engines.client import EngineError, PauseMode
from tests.contract.conftest import TOLERANCE, Model, Served
from tests.rollout import tiny
from tests.rollout.tiny import PROMPTS, logprobs_of, reference_logprobs

pytestmark = pytest.mark.asyncio(loop_scope="session")


def reason(answer: dict[str, Any]) -> str:
    return answer["meta_info"]["finish_reason"]["type"]


async def test_abort_answers_with_what_there_is(engine: Served, a: Model) -> None:
    mine = await engine.running([PROMPTS[0]], rid=["group-1/a"])
    others = await engine.running([PROMPTS[1]], rid=["group-2/a"])
    await engine.client.abort("group-1/a")
    (answer,) = await mine
    assert reason(answer) == "abort"
    assert 0 < len(answer["output_ids"]) < engine.forever
    expected = reference_logprobs(a.reference, PROMPTS[0] + answer["output_ids"])[len(PROMPTS[0]) - 1 :]
    torch.testing.assert_close(logprobs_of(answer), expected, atol=TOLERANCE, rtol=0)
    assert not others.done()
    await engine.client.abort("nobody")
    await engine.client.abort(everything=True)
    assert reason((await others)[0]) == "abort"


async def test_pause_abort_ends_what_runs_and_holds_what_comes(engine: Served) -> None:
    task = await engine.running([PROMPTS[0]])
    await engine.client.pause("abort")
    assert reason((await task)[0]) == "abort"
    assert not await engine.client.ready()
    assert await engine.client.answers()
    held = asyncio.create_task(engine.sample(PROMPTS[0], max_new_tokens=3))
    await asyncio.sleep(0.3)
    assert not held.done()
    await engine.client.resume()
    assert reason((await held)[0]) == "length"
    assert await engine.client.ready()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_freezes_and_what_it_froze_goes_on(engine: Served, a: Model, mode: PauseMode) -> None:
    first, second = await engine.running([PROMPTS[0]]), await engine.running([PROMPTS[1]])
    await engine.client.pause(mode)
    if mode == "in_place":
        with pytest.raises(EngineError):
            await engine.client.flush_cache()
    else:
        await engine.client.flush_cache()
    await asyncio.sleep(0.5)
    assert not first.done()
    assert not second.done()
    await engine.client.resume()
    answers = await engine.cut_off(first, 2) + await second
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        assert reason(answer) == "abort"
        assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
        expected = reference_logprobs(a.reference, prompt + answer["output_ids"])[len(prompt) - 1 :]
        torch.testing.assert_close(logprobs_of(answer), expected, atol=TOLERANCE, rtol=0)


async def test_memory_is_given_back_and_taken_again(engine: Served, a: Model) -> None:
    task = await engine.running([PROMPTS[0]])
    await engine.client.pause("retract")
    await engine.client.release_memory(["kv_cache"])
    await engine.client.resume_memory(["kv_cache"])
    await engine.client.resume()
    (answer,) = await engine.cut_off(task, 1)
    expected = reference_logprobs(a.reference, PROMPTS[0] + answer["output_ids"])[len(PROMPTS[0]) - 1 :]
    torch.testing.assert_close(logprobs_of(answer), expected, atol=TOLERANCE, rtol=0)
    await engine.client.pause("retract")  # SGLang's scheduler dies if it is not quite idle
    await engine.client.release_memory()
    await engine.client.resume_memory()
    await engine.client.resume()
    await engine.client.update_from_disk(str(a.folder), "1")
    assert await engine.greedy(PROMPTS[0]) == tiny.greedy(a.reference, PROMPTS[0], 8)
