"""An engine, weights and a tokenizer that do as a test says, where the broker is a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

EOS = 9


class Tokens:
    """A character is a token."""

    eos_id = EOS

    def encode_prompt(self, prompt: str) -> list[int]:
        return [ord(letter) % 8 for letter in prompt]

    def decode(self, ids: list[int]) -> str:
        return "".join(str(token) for token in ids)


class Engine:
    """Answers each sample with its seed's last digit; `hold(index)` keeps one back, `version` is what it samples under."""

    url = "http://127.0.0.1:1"

    def __init__(self, version: int = 1) -> None:
        self.version = version
        self.requests: list[dict[str, Any]] = []
        self.held: dict[int, asyncio.Event] = {}
        self.during: Callable[[], None] = lambda: None
        self.interruptions = 0
        """So many of the next samples end after one token, aborted from outside."""
        self.logprob: float | None = -0.5

    def hold(self, *indices: int) -> None:
        self.held |= {index: asyncio.Event() for index in indices}

    async def generate(self, body: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        self.requests.append(body)
        first = self.version
        number = body["rid"].split("/")[2:]
        if number and int(number[0]) in self.held:
            await self.held[int(number[0])].wait()
        await asyncio.sleep(0)
        self.during()
        seed = body["sampling_params"].get("sampling_seed", 0)
        return [self._answer(seed + i, first) for i in range(body["sampling_params"]["n"])]

    def _answer(self, seed: int, first: int) -> dict[str, Any]:
        ids, versions = [seed % 8, EOS], [{"version": str(first), "start": 0, "end": 1}]
        versions.append({"version": str(self.version), "start": 1, "end": 2})
        if self.version == first:
            versions = [{"version": str(first), "start": 0, "end": 2}]
        finish: dict[str, Any] = {"type": "stop"}
        if self.interruptions:
            self.interruptions -= 1
            ids, versions = ids[:1], [{"version": str(first), "start": 0, "end": 1}]
            finish = {"type": "abort", "message": "aborted from outside", "status_code": 499}
        meta = {
            "finish_reason": finish,
            "output_token_logprobs": [[self.logprob, token] for token in ids],
            "weight_versions": versions,
        }
        return {"output_ids": ids, "meta_info": meta}


class Receiver:
    """Weights of `step`; a version is the step's number plus 1."""

    def __init__(self, step: int = 0) -> None:
        self.step = step

    @property
    def version(self) -> int:
        return self.step + 1

    def step_of(self, version: int) -> int:
        return version - 1

    async def wait_step(self, min_step: int, timeout_s: float) -> bool:
        end = asyncio.get_running_loop().time() + timeout_s
        while self.step < min_step and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110 - tests set `step`
            await asyncio.sleep(0.01)
        return self.step >= min_step
