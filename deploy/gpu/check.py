"""What the trainer does on a GPU, in a few minutes: parity with the CPU, a bfloat16 step, NCCL, memory of scoring, throughput.

Each check is a process of its own with a deadline, so that one that fails or hangs does not hide the others. Prints a line a
check and a JSON object at the end; exit code 1 if any check failed. `--rehearse` goes the same ways on the CPU with tiny models,
to see that the script itself works before a machine is borrowed (tests/deploy/test_gpu_check.py). Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 240
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40": 181, "4090": 165, "A10": 125}
"""Dense bfloat16, by what the device's name contains."""
TINY = {"vocab_size": 997, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 16}
SHAPE_06B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def build(folder: Path, **shape: Any) -> Path:
    """A random Qwen3, unless it is there already."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32768}
    config = Qwen3Config(**{**heads, "tie_word_embeddings": True, **shape})
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def samples(count: int, length: int, vocabulary: int) -> list[Any]:
    import numpy as np

    from services.trainer.batches import TrainSample

    rng = np.random.default_rng(0)
    return [
        TrainSample(
            group_id=f"0-{number // 4}",
            ids=rng.integers(0, vocabulary, length).astype(np.int64),
            prompt_len=max(1, length // 4),
            mask=np.ones(length - max(1, length // 4), dtype=np.uint8),
            logprobs=rng.normal(-6, 0.5, length - max(1, length // 4)).astype(np.float32),
            advantage=float(rng.normal()),
        )
        for number in range(count)
    ]


def policy_on(device: str, folder: Path, dtype: str) -> Any:
    from services.trainer.megatron.policy import Policy
    from shared.sections import TrainerConfig

    return Policy.create(folder, TrainerConfig(), device, dtype=dtype)


def grpo() -> Any:
    from services.trainer.objectives import Objective
    from shared.algorithms import GrpoConfig

    return Objective("policy", GrpoConfig())


def environment(where: Path, device: str) -> dict[str, Any]:
    """Versions, the device, and which layers are used."""
    import torch
    import transformers
    from megatron.core import __version__ as megatron

    from services.trainer.megatron.model import TRANSFORMER_ENGINE

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "megatron": megatron,
        "transformers": transformers.__version__,
        "transformer_engine": TRANSFORMER_ENGINE,
    }
    if device == "cuda":
        found |= {"device": torch.cuda.get_device_name(), "memory_gb": torch.cuda.mem_get_info()[1] >> 30}
    return found


def first_step(where: Path, device: str, dtype: str) -> dict[str, Any]:
    """Log-probabilities, loss and gradients of one micro-batch, written to a file of this device and type."""
    import torch
    from safetensors.torch import save_file

    from services.trainer.batches import pack

    torch.backends.cuda.matmul.allow_tf32 = False
    policy = policy_on(device, build(where / "tiny", **TINY), dtype)
    (batch,) = pack(samples(8, 40, TINY["vocab_size"]), 1000)
    logprobs_N, _ = policy.logprobs(batch)
    sums = policy.forward_backward(batch, grpo())
    tensors = {name: tensor.float().cpu().clone() / sums["denominator"] for name, tensor in policy.gradients()}
    save_file({**tensors, "logprobs": logprobs_N.float().cpu()}, where / f"{device}-{dtype}.safetensors")
    return {"loss": sums["loss"] / sums["denominator"]}


def on_cpu(where: Path, device: str) -> dict[str, Any]:
    return first_step(where, "cpu", "float32")


def parity(where: Path, device: str, dtype: str, tolerance: float) -> dict[str, Any]:
    """The same on the device, against the CPU in float32."""
    from safetensors.torch import load_file

    found = first_step(where, device, dtype)
    ours, theirs = (load_file(where / f"{name}.safetensors") for name in (f"{device}-{dtype}", "cpu-float32"))
    gaps = {name: float((ours[name] - theirs[name]).abs().max()) for name in theirs}
    largest = max(float(tensor.abs().max()) for name, tensor in theirs.items() if name != "logprobs")
    found |= {"logprob_gap": gaps.pop("logprobs"), "gradient_gap": max(gaps.values()), "largest_gradient": largest}
    if found["logprob_gap"] > tolerance or found["gradient_gap"] > tolerance * max(1.0, largest):
        raise SystemExit(f"{device} {dtype} differs from the CPU: {found}")
    return found


def float32_parity(where: Path, device: str) -> dict[str, Any]:
    return parity(where, device, "float32", 1e-3)


def bfloat16_parity(where: Path, device: str) -> dict[str, Any]:
    return parity(where, device, "bfloat16", 0.1)


def bfloat16_learns(where: Path, device: str) -> dict[str, Any]:
    """Eight supervised steps with float32 copies bring the loss down; a restored state goes on."""
    from services.trainer.batches import pack
    from services.trainer.objectives import SFT
    from services.trainer.state_files import file_of, write

    policy = policy_on(device, build(where / "tiny", **TINY), "bfloat16")
    batches, losses = pack(samples(8, 40, TINY["vocab_size"]), 1000), []
    for step in range(9):
        sums = policy.forward_backward(batches, SFT)
        losses.append(sums["loss"] / sums["denominator"])
        if step == 4:
            folder = where / "state"
            folder.mkdir()
            write(folder / file_of(0), list(policy.state_tensors()))
            policy.restore(folder)
            sums = policy.forward_backward(batches, SFT)
        policy.update(sums["denominator"], 1e-2)
    if losses[-1] > 0.8 * losses[0]:
        raise SystemExit(f"the loss does not fall: {losses}")
    return {"first_loss": losses[0], "last_loss": losses[-1]}


def broadcast(where: Path, device: str) -> dict[str, Any]:
    """A broadcast group of one beside Megatron's own groups, over NCCL where there is CUDA."""
    import torch

    from services.dcs import collective

    policy_on(device, build(where / "tiny", **TINY), "float32")
    backend = "nccl" if device == "cuda" else "gloo"
    store = collective.host_store(30)
    group = collective.join("127.0.0.1", store.port, 1, 0, "check", backend, 60, store)
    data = torch.arange(1 << 20, dtype=torch.uint8, device=device) % 251
    collective.broadcast(group, data, time.monotonic() + 60)
    collective.leave(group)
    return {"backend": backend}


def scoring_memory(where: Path, device: str) -> dict[str, Any]:
    """Peak of log-probabilities and their gradient beyond the inputs, against whole logits."""
    import torch

    from services.trainer.megatron.scoring import score_tokens

    count, vocabulary, hidden_size = (8192, 151936, 1024) if device == "cuda" else (64, 997, 32)
    found = {}
    for name in ("chunked", "whole"):
        hidden = torch.randn(count, hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocabulary, hidden_size, device=device, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.randint(0, vocabulary, (count, 1), device=device)
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.monotonic()
        if name == "chunked":
            logprobs = score_tokens(hidden, weight, ids, 1.0)[0]
        else:
            logprobs = (hidden @ weight.t()).float().log_softmax(-1).gather(1, ids)
        logprobs.sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
            found[f"{name}_peak_mb"] = (torch.cuda.max_memory_allocated() - before) >> 20
        found[f"{name}_s"] = round(time.monotonic() - started, 3)
        del hidden, weight, logprobs
    return found


def throughput(where: Path, device: str) -> dict[str, Any]:
    """Tokens a second and model FLOP utilisation of whole updates in bfloat16 at the shape of Qwen3-0.6B."""
    import torch

    from services.trainer.batches import pack

    shape = SHAPE_06B if device == "cuda" else TINY
    length, count, budget = (1024, 32, 16384) if device == "cuda" else (32, 8, 128)
    policy = policy_on(device, build(where / "large", **shape), "bfloat16")
    batches, loss, seconds = pack(samples(count, length, shape["vocab_size"]), budget), grpo(), []
    for _ in range(6):
        started = time.monotonic()
        sums = policy.forward_backward(batches, loss)
        policy.update(sums["denominator"], 1e-6)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
    rate = count * length / min(seconds[1:])
    architecture = policy.architecture
    matrices = sum(
        p.numel() for p in policy.chunks[0].parameters() if p.dim() == 2
    )  # the tied embedding is the output matrix
    attention = 6 * architecture.layers * architecture.heads * architecture.head_dim * length  # causal: half of 12
    found: dict[str, Any] = {"tokens_per_s": round(rate), "parameters_m": round(matrices / 1e6, 1)}
    if device == "cuda":
        name = torch.cuda.get_device_name()
        peak = next((tflops for part, tflops in PEAK_TFLOPS.items() if part in name), None)
        found |= {"tflops": round(rate * (6 * matrices + attention) / 1e12, 1)}
        found |= {"peak_memory_gb": round(torch.cuda.max_memory_allocated() / 2**30, 1)}
        if peak is not None:
            found["model_flop_utilisation"] = round(found["tflops"] / peak, 3)
    return found


CHECKS: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    check.__name__: check
    for check in (
        environment,
        on_cpu,
        float32_parity,
        bfloat16_parity,
        bfloat16_learns,
        broadcast,
        scoring_memory,
        throughput,
    )
}


def run(name: str, where: Path, device: str) -> dict[str, Any]:
    """One check in a process of its own: {"ok", "seconds", ...}."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if name == "on_cpu" else {}
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, "--check", name, "--where", str(where), "--device", device],
            env={**os.environ, "OMP_NUM_THREADS": "4", **hidden},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        return {"ok": False, "error": f"not done after {DEADLINE_S} s"}
    seconds = round(time.monotonic() - started, 1)
    if done.returncode != 0:
        return {"ok": False, "seconds": seconds, "error": done.stderr.strip()[-1500:]}
    return {"ok": True, "seconds": seconds, **json.loads(done.stdout.splitlines()[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rehearse", action="store_true", help="on the CPU with tiny models")
    parser.add_argument("--out", type=Path, help="write the results here too")
    parser.add_argument("--only", nargs="*", choices=CHECKS, help="some of the checks")
    parser.add_argument("--check", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--where", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.check:
        print(json.dumps(CHECKS[options.check](options.where, options.device)))
        return 0
    device = "cpu" if options.rehearse else "cuda"
    results: dict[str, Any] = {"rehearsal": options.rehearse}
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only or CHECKS:
            results[name] = found = run(name, Path(scratch), device)
            print(f"{'ok    ' if found['ok'] else 'FAILED'} {name}: {json.dumps(found)}", flush=True)
    text = json.dumps(results)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0 if all(results[name]["ok"] for name in options.only or CHECKS) else 1


if __name__ == "__main__":
    sys.exit(main())
