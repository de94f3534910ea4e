"""Tokens per CPU second of the light engine through HTTP, beside `transformers` generate on the same checkpoint.

    python -m benchmarks.light_engine [--rounds 5] [--vocab 512]

tokens per CPU second at 1, 32 and 128 concurrent requests through HTTP, beside `transformers` generate on the same checkpoint
(same batch sizes). Aim: at least 1.5x at 32. The model is a random Qwen3 of 2 layers and hidden size 128; each request has 16
prompt tokens and 64 new ones, sampled at temperature 1 with log-probabilities, in one thread. CPU seconds are those of the
engine's process and its children, HTTP and JSON included; the client's are told apart. `transformers` is run in a process of
its own, on prompts of one length, without HTTP and without log-probabilities: everything it is spared is in its favour.
The better of several rounds counts on both sides, and rounds alternate, so that other load on the machine meets both.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from services.rollout.engines.client import EngineClient
from services.rollout.engines.process import EngineProcess

REPEATS = {1: 8, 32: 4, 128: 2}
"""Concurrent requests, and how often each is asked in one round: CPU time is counted in hundredths of a second."""
PROMPT, NEW = 16, 64
AIM = 1.5


def build(folder: Path, vocab: int) -> None:
    """Write the checkpoint."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)


def prompts(count: int, vocab: int) -> list[list[int]]:
    return [[4 + (7 * row + 3 * place) % (vocab - 4) for place in range(PROMPT)] for row in range(count)]


def baseline(pipe: Connection, folder: str, vocab: int) -> None:
    """A process that answers (batch size, repeats) with (tokens, CPU seconds, seconds) of that many `generate`."""
    import torch
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    while (asked := pipe.recv()) is not None:
        size, repeats = asked
        ids = torch.tensor(prompts(size, vocab))
        settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": True, "top_k": 0, "temperature": 1.0}
        tokens, wall, cpu = 0, time.perf_counter(), time.process_time()
        with torch.inference_mode():
            for _ in range(repeats):
                out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
                tokens += size * (out.shape[1] - PROMPT)
        pipe.send((tokens, time.process_time() - cpu, time.perf_counter() - wall))


def cpu_seconds(pid: int) -> float:
    process = psutil.Process(pid)
    return sum(sum(p.cpu_times()[:2]) for p in (process, *process.children(recursive=True)))


async def through_http(
    engine: EngineClient, pid: int, size: int, vocab: int, repeats: int
) -> tuple[int, float, float, float]:
    """`size` clients that each ask `repeats` times: (tokens, CPU seconds of the engine, seconds, CPU seconds of the client)."""
    sampling = {"temperature": 1.0, "max_new_tokens": NEW, "ignore_eos": True}

    async def client(prompt: list[int]) -> int:
        total = 0
        for _ in range(repeats):
            answers = await engine.generate({"input_ids": prompt, "sampling_params": sampling, "return_logprob": True})
            total += len(answers[0]["meta_info"]["output_token_logprobs"])
        return total

    wall, cpu, own = time.perf_counter(), cpu_seconds(pid), time.process_time()
    tokens = sum(await asyncio.gather(*[client(prompt) for prompt in prompts(size, vocab)]))
    return tokens, cpu_seconds(pid) - cpu, time.perf_counter() - wall, time.process_time() - own


async def measure(folder: Path, vocab: int, rounds: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    other = context.Process(target=baseline, args=(far_end, str(folder), vocab), daemon=True)
    other.start()
    engine = await EngineProcess.start("light", folder, {"device": "cpu", "threads": 1})
    results: dict[str, Any] = {"load_at_start": round(os.getloadavg()[0], 1)}
    try:
        async with EngineClient(engine.url) as client:
            for size in REPEATS:
                repeats = REPEATS[size]
                ours: list[tuple[int, float, float, float]] = []
                theirs: list[tuple[int, float, float]] = []
                for _ in range(rounds + 1):  # the first round warms both up
                    ours.append(await through_http(client, engine.pid, size, vocab, repeats))
                    pipe.send((size, repeats))
                    theirs.append(await asyncio.to_thread(pipe.recv))
                results |= summary(size, ours[1:], theirs[1:])
        pipe.send(None)
        other.join(10)
    finally:
        await engine.stop()
        other.kill()
    return results


def summary(
    size: int, ours: list[tuple[int, float, float, float]], theirs: list[tuple[int, float, float]]
) -> dict[str, float]:
    engine_rate = max(tokens / cpu for tokens, cpu, _, _ in ours)
    other_rate = max(tokens / cpu for tokens, cpu, _ in theirs)
    client_rate = max(tokens / own for tokens, _, _, own in ours)
    wall_rate = max(tokens / wall for tokens, _, wall, _ in ours)
    other_wall = max(tokens / wall for tokens, _, wall in theirs)
    print(
        f"{size:4d} requests: light engine {engine_rate:7.0f} tokens/CPU-s ({wall_rate:7.0f} tokens/s), transformers generate "
        f"{other_rate:6.0f} ({other_wall:6.0f}), ratio {engine_rate / other_rate:5.2f}; client {client_rate:7.0f} tokens/CPU-s"
    )
    return {
        f"light_tokens_per_cpu_s_{size}": round(engine_rate),
        f"transformers_tokens_per_cpu_s_{size}": round(other_rate),
        f"ratio_vs_transformers_{size}": round(engine_rate / other_rate, 2),
        f"light_tokens_per_s_{size}": round(wall_rate),
        f"transformers_tokens_per_s_{size}": round(other_wall),
        f"client_tokens_per_cpu_s_{size}": round(client_rate),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=512)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), arguments.vocab)
        results = asyncio.run(measure(Path(folder), arguments.vocab, arguments.rounds))
    reached = results["ratio_vs_transformers_32"] >= AIM
    print(f"aim: at least {AIM} at 32: {'reached' if reached else 'MISSED'}")
    print(json.dumps({"benchmark": "light_engine", "vocab": arguments.vocab, "aim_ratio_32": AIM, **results}))
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
