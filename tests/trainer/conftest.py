"""Tiny models and samples that the trainer's tests share. Everything runs on the CPU with one thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.trainer.batches import TrainSample

VOCABULARY = 96


def build_model(folder: Path, *, tied: bool, seed: int = 0, **shape: Any) -> Path:
    """A small Qwen3 as transformers writes it, with norms that are not all one."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "tie_word_embeddings": tied,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "initializer_range": 0.1,
            **shape,
        }
    )
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "untied", tied=False)


@pytest.fixture
def make_policy(tied_folder: Path) -> Callable[..., Any]:
    """`make_policy(folder=..., seed=..., **TrainerConfig fields)`."""

    def make(folder: Path = tied_folder, dtype: str = "float32", seed: int = 0, **fields: Any) -> Any:
        from services.trainer.megatron.policy import Policy
        from shared.sections import TrainerConfig

        return Policy.create(folder, TrainerConfig(**fields), dtype=dtype, seed=seed)

    return make


def samples(
    count: int = 12, *, seed: int = 0, prompt: tuple[int, int] = (1, 9), completion: tuple[int, int] = (1, 12)
) -> list[TrainSample]:
    """Random samples in groups of four; about one completion token in five was written by an environment."""
    rng = np.random.default_rng(seed)

    def one(index: int) -> TrainSample:
        before, after = int(rng.integers(*prompt)), int(rng.integers(*completion))
        return TrainSample(
            group_id=f"0-{index // 4}",
            ids=rng.integers(0, VOCABULARY, before + after).astype(np.int32),
            prompt_len=before,
            mask=(rng.random(after) > 0.2).astype(np.uint8),
            logprobs=rng.normal(-4, 0.7, after).astype(np.float32),
            advantage=float(rng.normal()),
        )

    return [one(index) for index in range(count)]
