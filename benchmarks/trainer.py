"""The trainer's policy beside a plain `transformers` and AdamW loop, packing beside padding, and what scoring and export cost.

    python -m benchmarks.trainer [--rounds 5]

    ratio_vs_transformers       trained tokens per CPU second against a plain loop: the same Qwen3 (4 layers, hidden size 256),
                                the same batch of 8 sequences of 128 tokens, loss, clipping and AdamW. Aim: at least 1.0
    ratio_vs_transformers_ragged  the same on ragged lengths, which the plain loop pads
    ratio_packing_vs_padding    real tokens per CPU second, packed against padded to the longest, by the same policy, on ragged
                                lengths as completions have them (geometric, at most 512). Aim: at least 2.5
    logprob_peak_mb             memory that log-probabilities and their gradient take beyond their inputs, for 4096 tokens and
                                32768 ids, and what the whole logits take by log_softmax; ratio_logprob_peak
    checkpoint_copy_ms          how long training stands still for a checkpoint of weights and Adam's moments (checkpoint_mb in
                                all); checkpoint_ms: until it is durable; the same with two tensor-parallel ranks
    export_mb_s                 Hugging Face tensors out of the policy into the buckets of a broadcast: one rank, and two
                                tensor-parallel ranks (three processes on two cores: a floor, not a figure)
    ratio_by_stage              the same from two pipeline stages, each into buckets of its own, over all of it into the leader's

Everything runs on the CPU in one thread, in float32. Sides alternate and the better of several rounds counts on both, so that
other load on the machine meets both. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.batches import TrainSample, pack

VOCABULARY = 8192
SCORED, SCORED_VOCABULARY, HIDDEN = 4096, 32768, 256
LONGEST = 512


def build(folder: Path) -> Path:
    """Write the checkpoint: 8 million parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def sample(length: int, seed: int, padded_to: int = 0) -> TrainSample:
    """A prompt of one token and its completion; padding is tokens that an environment might have written."""
    rng = np.random.default_rng(seed)
    total = max(length, padded_to)
    mask = np.zeros(total - 1, dtype=np.uint8)
    mask[: length - 1] = 1
    ids = rng.integers(0, VOCABULARY, total).astype(np.int64)
    return TrainSample("0-0", ids, 1, mask, np.full(total - 1, -9.0, dtype=np.float32), 1.0)


def ragged(count: int = 14) -> list[int]:
    """Lengths of completions that end by chance: many short ones, few long ones."""
    lengths = 2 + np.random.default_rng(0).geometric(1 / 90, count)
    return [*np.minimum(lengths, LONGEST - 1).tolist(), LONGEST]


Step = Callable[[], None]


def our_step(folder: Path, samples: list[TrainSample], budget: int) -> Step:
    """One update by the trainer's policy."""
    from services.trainer.algorithms.sft import sft
    from services.trainer.megatron.policy import Policy
    from shared.sections import TrainerConfig

    policy = Policy.create(folder, TrainerConfig())

    def step() -> None:
        denominator = 0.0
        for batch in pack(samples, budget):
            denominator += policy.forward_backward(batch, sft)["denominator"]
        policy.update(denominator, 1e-5)

    return step


def plain_step(folder: Path, samples: list[TrainSample]) -> Step:
    """One update as a plain loop makes it: padded, logits, log_softmax, mean, clip, AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0)
    longest = max(len(one.ids) for one in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, one in enumerate(samples):
        ids[row, : len(one.ids)] = torch.from_numpy(one.ids)
        attention[row, : len(one.ids)] = 1
    several = attention.min() == 0

    def step() -> None:
        logits = model(ids, attention_mask=attention if several else None).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        loss = -(logprobs * attention[:, 1:]).sum() / attention[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def rates(steps: dict[str, Step], tokens: int, rounds: int) -> dict[str, float]:
    """Best tokens per CPU second of each, in turns. The first round warms all up."""
    best = dict.fromkeys(steps, 0.0)
    for number in range(rounds + 1):
        for name, step in steps.items():
            started = time.process_time()
            step()
            if number:
                best[name] = max(best[name], tokens / (time.process_time() - started))
    return best


def speed(folder: Path, rounds: int) -> dict[str, float]:
    even = [sample(128, seed) for seed in range(8)]
    lengths = ragged()
    uneven = [sample(length, seed) for seed, length in enumerate(lengths)]
    padded = [sample(length, seed, padded_to=LONGEST) for seed, length in enumerate(lengths)]
    same = rates({"ours": our_step(folder, even, 1024), "plain": plain_step(folder, even)}, 8 * 128, rounds)
    steps = {
        "packed": our_step(folder, uneven, 4096),
        "padded": our_step(folder, padded, 4096),
        "plain": plain_step(folder, uneven),
    }
    mixed = rates(steps, sum(lengths), rounds)
    print(f"even lengths: ours {same['ours']:.0f} tokens/CPU-s, transformers {same['plain']:.0f}")
    print(
        f"ragged lengths ({len(lengths)} sequences, {sum(lengths)} tokens, {len(lengths) * LONGEST} padded): packed "
        f"{mixed['packed']:.0f} tokens/CPU-s, padded {mixed['padded']:.0f}, transformers {mixed['plain']:.0f}"
    )
    return {
        "tokens_per_cpu_s": round(same["ours"]),
        "transformers_tokens_per_cpu_s": round(same["plain"]),
        "ratio_vs_transformers": round(same["ours"] / same["plain"], 2),
        "ratio_vs_transformers_ragged": round(mixed["packed"] / mixed["plain"], 2),
        "ratio_packing_vs_padding": round(mixed["packed"] / mixed["padded"], 2),
    }


def in_a_process(function: Callable[..., None], *arguments: Any) -> Any:
    """What `function` sends as its answer, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=function, args=(*arguments, far))
    process.start()
    answer = near.recv()
    process.join(60)
    return answer


def scoring_peak(whole: bool, answer: Any) -> None:
    """In a process of its own: bytes at the peak beyond what the inputs take."""
    import resource

    import torch

    from services.trainer.megatron.scoring import score_tokens

    torch.set_num_threads(1)
    hidden = torch.randn(SCORED, HIDDEN, requires_grad=True)
    weight = torch.randn(SCORED_VOCABULARY, HIDDEN, requires_grad=True)
    ids = torch.randint(0, SCORED_VOCABULARY, (SCORED, 1))
    (hidden[:64] @ weight[:64].t()).sum().backward()  # buffers of the matrix library
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if whole:
        logprobs = (hidden @ weight.t()).float().log_softmax(-1)
        entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
        found = logprobs.gather(1, ids)
    else:
        found, entropy = score_tokens(hidden, weight, ids, 1.0)
    found.sum().backward()
    assert torch.isfinite(entropy).all()
    answer.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def scoring() -> dict[str, float]:
    peaks = {name: in_a_process(scoring_peak, whole) / 1024 for name, whole in (("ours", False), ("whole", True))}
    print(
        f"log-probabilities of {SCORED} x {SCORED_VOCABULARY}: {peaks['ours']:.0f} MB, whole logits {peaks['whole']:.0f} MB"
    )
    return {
        "logprob_peak_mb": round(peaks["ours"]),
        "naive_logprob_peak_mb": round(peaks["whole"]),
        "ratio_logprob_peak": round(peaks["whole"] / peaks["ours"], 1),
    }


def policy_of(folder: Path, ranks: int, cut: str) -> Any:
    """On so many ranks, cut that way."""
    from services.trainer.build import build as build_policy
    from services.trainer.channel import gather
    from shared.config import parse

    config = parse(
        {
            "run": "bench",
            "steps": 1,
            "groups_per_step": 1,
            "samples_per_group": 2,
            "model": {"path": str(folder)},
            "prompts": {"source": "unused.prompts"},
            "reward": {"functions": [{"path": "unused.reward"}]},
            "trainer": {"ranks": ranks, "megatron": {cut: ranks}},
        },
        "benchmark",
    )
    return build_policy(config, gather(config))


def moving(folder: Path, ranks: int, answer: Any) -> None:
    """In a process of its own: megabytes a second of the best of five exports into broadcast buckets, and what the best of five
    checkpoints takes."""
    from services.trainer import saving
    from services.trainer.checkpoint import CheckpointStore
    from services.trainer.objectives import SFT
    from services.trainer.spread import spread
    from services.trainer.weight_copy import Copier

    policy = policy_of(folder, ranks, "tensor_model_parallel_size")
    copier, rate = Copier(64 << 20), 0.0
    for _ in range(5):
        started = time.perf_counter()
        copied = copier.copy(policy.hf_tensors())
        rate = max(rate, sum(copied.outline.nbytes) / 1e6 / (time.perf_counter() - started))
    (one,) = spread([(sample(64, 0),)], 64, policy.layout)
    policy.update(policy.forward_backward(one, SFT)["denominator"], 1e-5)
    store, copy_s, durable_s = CheckpointStore(folder.parent / f"checkpoints-{ranks}", keep=1), [], []
    size = 0.0
    for step in range(5):
        started = time.perf_counter()
        unfinished = saving.begin(store, policy.ranks, {"policy": ""}, step)
        copy_s.append(time.perf_counter() - started)
        while (written := policy.ranks.saved()) is None:
            time.sleep(saving.POLL_S)
        store.finish(unfinished, written, {})
        durable_s.append(time.perf_counter() - started)
        size = sum(file["size"] for file in written.values()) / 1e6
    policy.close()
    answer.send((rate, 1e3 * min(copy_s), 1e3 * min(durable_s), size))


def staged(folder: Path, answer: Any) -> None:
    """In a process of its own: seconds of the best of nine exports from two pipeline stages, by the leader and by each stage."""
    from services.trainer.weight_copy import Copier

    policy = policy_of(folder, 2, "pipeline_model_parallel_size")
    copier, best = Copier(64 << 20), [float("inf")] * 2
    policy.open_stages(64, 60.0)
    for _ in range(9):
        for way, tensors in enumerate((policy.hf_tensors, policy.outgoing)):
            started = time.perf_counter()
            copier.copy(tensors())
            best[way] = min(best[way], time.perf_counter() - started)
    policy.close()
    answer.send(best)


def by_stage(folder: Path) -> dict[str, float]:
    leader, stages = in_a_process(staged, folder)
    print(
        f"export of two pipeline stages: {1e3 * leader:.0f} ms by the leader, {1e3 * stages:.0f} ms by each of its own"
    )
    return {"ratio_by_stage": round(leader / stages, 2)}


def moved(folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for suffix, ranks in (("", 1), ("_tp2", 2)):
        rate, copy_ms, durable_ms, size = (round(value) for value in in_a_process(moving, folder, ranks))
        found |= {f"export{suffix}_mb_s": rate, f"checkpoint{suffix}_copy_ms": copy_ms}
        found |= {f"checkpoint{suffix}_ms": durable_ms, "checkpoint_mb": size}
        print(
            f"{ranks} rank(s): export with checksums {rate} MB/s; a checkpoint of {size} MB stops training for {copy_ms} ms and "
            f"is durable after {durable_ms} ms"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = build(Path(scratch) / "model")
        results: dict[str, float] = {"load_at_start": round(os.getloadavg()[0], 1)}
        results |= scoring() | moved(folder) | by_stage(folder) | speed(folder, options.rounds)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
