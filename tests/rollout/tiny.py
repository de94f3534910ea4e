"""A tiny random Qwen3 in a Hugging Face folder, and its reference numbers by transformers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = 96
EOS = 2
CONTEXT = 1 << 16
FOREVER = 40_000
"""Tokens of a sample that a test wants in the middle of decoding: minutes of work, so that no stall of the test lets it end by
itself. The test aborts it."""
PROMPTS = [[5, 6, 7, 8, 9], [11] * 17, [3, 94, 50], list(range(4, 44)), [60], [12, 90, 13, 91, 14, 92]]


def build(folder: Path, seed: int = 0, tied: bool = True, **changes: Any) -> Qwen3ForCausalLM:
    """Write the folder; returns the model that is in it. Weights are large enough that tokens are far from uniform."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.15,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    config = Qwen3Config(tie_word_embeddings=tied, **(options | changes))
    model = Qwen3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def reference_logprobs(model: Qwen3ForCausalLM, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each token but the first, given those before it."""
    logits = model(torch.tensor([tokens])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@torch.no_grad()
def greedy(model: Qwen3ForCausalLM, prompt: list[int], count: int) -> list[int]:
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None)
    return out[0, len(prompt) :].tolist()


def logprobs_of(answer: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.002)
