"""What is compared between layouts: two GRPO updates of a small model, seen from the outside."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from services.dcs.digest import tensor_checksum
from services.trainer.algorithms.reductions import merge
from services.trainer.batches import TrainSample
from services.trainer.checkpoint import CheckpointStore
from services.trainer.layout import Layout
from services.trainer.objectives import Objective
from services.trainer.ranks import RankedPolicy
from services.trainer.saving import save
from services.trainer.spread import Spread, spread
from services.trainer.weight_copy import Copier, manifest_of
from shared.algorithms import GrpoConfig
from shared.config import RunConfig, parse
from tests.trainer.conftest import samples
from tests.trainer.models import VOCABULARY

BUDGET = 64
GRPO = Objective("policy", GrpoConfig())
VALUES = Objective("critic", constants={"value_clip": None})
CRITIC = "critic"
STATES = {"policy": "", CRITIC: "critic/"}
"""Models and their prefixes in a checkpoint of both."""


def run_config(folder: Path, ranks: int, megatron: dict[str, Any], dtype: str = "float32", **trainer: Any) -> RunConfig:
    """The least that a run file needs, around `trainer.megatron`."""
    return parse(
        {
            "run": "layouts",
            "steps": 1,
            "groups_per_step": 1,
            "samples_per_group": 2,
            "model": {"path": str(folder), "dtype": dtype},
            "prompts": {"source": "unused.prompts"},
            "reward": {"functions": [{"path": "unused.reward"}]},
            "sampling": {"max_new_tokens": 16, "max_prompt_tokens": 16},
            "trainer": {
                "ranks": ranks,
                "megatron": megatron,
                "micro_batch_tokens": BUDGET,
                # A large epsilon: Adam would blow rounding up where a gradient is almost zero.
                "optimizer": {"lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1},
                **trainer,
            },
        },
        "tests",
    )


def update(policy: RankedPolicy, seed: int) -> dict[str, float]:
    """One GRPO update on samples that depend on the seed only; its metrics."""
    units = [(sample,) for sample in samples(24, seed=seed)]
    sums = merge(policy.forward_backward(one, GRPO, 0.9) for one in spread(units, BUDGET, policy.layout))
    return {**sums, **policy.update(sums["denominator"], 1e-2)}


def measure(policy: RankedPolicy, out: Path, earlier: Path | None = None) -> None:
    """Losses, gradients, scores, weights and a checkpoint, into `out`; and how it goes on from the checkpoint in `earlier`."""
    save_file({name: tensor.clone() for name, tensor in policy.hf_tensors()}, out / "loaded.safetensors")
    if policy.layout.pipeline > 1:
        measure_stages(policy)
    units = [(sample,) for sample in samples(24, seed=5)]
    scores = [found for one in spread(units, BUDGET, policy.layout) for found in policy.score(one, 0.9, top=3)]
    first = spread(units, BUDGET, policy.layout)
    sums = merge(policy.forward_backward(one, GRPO, 0.9) for one in first)
    mean = {name: tensor.clone() / sums["denominator"] for name, tensor in policy.gradients()}
    save_file(mean, out / "gradients.safetensors")
    outcome = policy.update(sums["denominator"], 1e-2)
    second = update(policy, seed=6)
    save_file({name: tensor.clone() for name, tensor in policy.hf_tensors()}, out / "trained.safetensors")
    store = CheckpointStore(out / "checkpoints")
    save(store, policy.ranks, {"policy": ""}, 2, {})
    third = update(policy, seed=7)
    if earlier is not None:
        resume(policy, earlier)
    numbers = {
        "first": {**sums, **outcome},
        "second": second,
        "third": third,
        "resumed": update(policy, seed=7) if earlier is not None else third,
        "logprob_sum": float(sum(found.logprobs_N.double().sum() for found in scores)),
        "entropy_sum": float(sum(found.entropy_N.double().sum() for found in scores)),
        "top_sum": float(sum(found.top_logprobs_NK.double().sum() for found in scores)),
    }
    (out / "numbers.json").write_text(json.dumps(numbers))


def measure_stages(policy: RankedPolicy) -> None:
    """Each pipeline stage copies its own tensors where they are: together all of them, once, as the leader would see them."""
    expected = {name: tensor_checksum(tensor) for name, tensor in policy.hf_tensors()}
    size = policy.layout.ranks // policy.layout.pipeline
    stages = policy.open_stages(bucket_mb=1, timeout_s=60.0)
    assert [stage.rank for stage in stages] == list(range(size, policy.layout.ranks, size))
    own = Copier(1 << 20).copy(policy.outgoing()).outline
    handles = [stage.handle(300.0) for stage in stages]
    outlines = [own, *(asyncio.run(handle.outline()) for handle in handles)]
    for handle in handles:
        handle.close()
    assert all(outline.specs for outline in outlines)
    manifest = manifest_of(outlines, 1, 0)  # raises if two have the same tensor
    assert {spec.name: spec.sha256 for spec in manifest.tensors} == expected


def measure_critic(policy: RankedPolicy, out: Path) -> None:
    """Three updates of a critic that shares the policy's ranks, and a checkpoint of both."""
    critic = policy.ranks.add(CRITIC, policy.folder, "critic")
    critic.copy_weights(policy)
    for seed in (5, 6, 7):
        sums = merge(critic.forward_backward(one, VALUES) for one in with_returns(seed, policy.layout))
        outcome = critic.update(sums["denominator"], 1e-2)
    values = [found for one in with_returns(5, policy.layout) for found in critic.score(one)]
    save(CheckpointStore(out / "checkpoints"), policy.ranks, STATES, 3, {})
    save_file({name: tensor.clone() for name, tensor in critic.hf_tensors()}, out / "trained.safetensors")
    found = {**sums, **outcome, "value_sum": float(sum(scores.logprobs_N.double().sum() for scores in values))}
    (out / "numbers.json").write_text(json.dumps(found))


def with_returns(seed: int, layout: Layout) -> list[Spread]:
    """Micro-batches of samples with something to predict."""
    units = []
    for number, sample in enumerate(samples(24, seed=seed)):
        returns = np.full(len(sample.mask), 0.1 * (number % 7), np.float32)
        units.append((replace(sample, extras={"returns": returns, "values": np.zeros_like(returns)}),))
    return spread(units, BUDGET, layout)


def resume(policy: RankedPolicy, out: Path) -> None:
    """Restore the checkpoint that `measure` left in `out`."""
    found = CheckpointStore(out / "checkpoints").load()
    assert found is not None
    policy.restore(found.entry.path)


def all_logprobs(policy: Any) -> torch.Tensor:
    """[N, V] log-probabilities of the whole vocabulary after each token of some sequences."""
    found = [
        scores
        for one in spread([(sample,) for sample in _whole_sequences()], 1000, policy.layout)
        for scores in policy.score(one, top=VOCABULARY)
    ]
    ids_NV = torch.cat([scores.top_ids_NK for scores in found])
    return torch.cat([scores.top_logprobs_NK for scores in found]).gather(1, ids_NV.argsort(1))


def transformers_logprobs(folder: Path) -> torch.Tensor:
    """The same from transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return torch.cat(
            [
                model(torch.from_numpy(sample.ids.astype("int64"))[None]).logits[0, :-1].log_softmax(-1)
                for sample in _whole_sequences()
            ]
        )


def _whole_sequences() -> list[TrainSample]:
    """Ascending lengths, as a micro-batch orders them."""
    rng = np.random.default_rng(3)
    return [
        TrainSample(
            group_id="0-0",
            ids=rng.integers(0, VOCABULARY, length).astype(np.int32),
            prompt_len=1,
            mask=np.ones(length - 1, dtype=np.uint8),
            logprobs=np.zeros(length - 1, dtype=np.float32),
            advantage=0.0,
        )
        for length in (5, 9, 30)
    ]


def means(sums: dict[str, float]) -> dict[str, float]:
    """Sums over tokens as means; what is none stays."""
    kept = {"denominator", "tokens", "sequences", "nonfinite_logprobs", "grad_norm", "updated", "lr"}
    return {
        name: value if name in kept or name.endswith("_max") else value / sums["denominator"]
        for name, value in sums.items()
    }


def tensors(out: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(out / f"{name}.safetensors")


def numbers(out: Path) -> dict[str, Any]:
    return json.loads((out / "numbers.json").read_text())
