"""One failed generation costs one delivery of one group: elsewhere it ended the worker, and what was in flight with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.rollout.engines.client import EngineError
from shared import wire
from shared.records import Event
from tests.rollout.scripted import Engine
from tests.rollout.test_worker import Bench, bench

__all__ = ["bench"]


class Moody(Engine):
    """Fails for one group, and aborts a sample of another whenever it is asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.all_there = asyncio.Event()

    async def generate(self, body: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        await self.all_there.wait()
        answers = await super().generate(body, timeout_s)
        if body["rid"].startswith("0-1/"):
            raise EngineError(500, "the logits are not finite")
        if body["rid"].startswith("0-2/"):
            answers[-1] = answers[-1] | {"output_ids": []}
            answers[-1]["meta_info"] |= {
                "finish_reason": {"type": "abort", "message": "out of memory"},
                "output_token_logprobs": [],
                "completion_tokens": 0,
                "weight_versions": [],
            }
        return answers


async def test_a_failed_generation_is_one_nack(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.rollout.draw.AGAIN_S", 0.01)
    bench.ctx.config.deterministic = False
    engine = Moody()
    bench.worker.engine = bench.worker.drawer.engine = engine  # type: ignore[assignment]
    working = [await bench.take(min_step=0, issue=issue) for issue in range(4)]
    engine.all_there.set()
    for one in working:
        await one
    assert sorted(group.id for group in await bench.made()) == ["0-0", "0-3"], "nor is a half-aborted group passed on"
    assert await bench.prompts() == 2, "the failed ones are delivered again"
    again = await bench.puller.next(60)
    assert again is not None
    assert again.delivered == 2
    events = [wire.decode(data, Event) async for data, _ in bench.ctx.queue.read("events")]
    told = {event.detail["group"]: event.message for event in events if event.kind == "episode_failed"}
    assert told.keys() == {"0-1", "0-2"}
    assert "logits" in told["0-1"]
    assert "interrupted 20 times in a row without a new token" in told["0-2"]
