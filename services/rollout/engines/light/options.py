"""The light engine's command line, as a value. `EngineOptions.parse` is the only place where an option is spelled."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class EngineOptions:
    model: Path
    host: str
    port: int
    device: str
    dtype: str
    threads: int
    max_running_requests: int
    max_total_tokens: int | None
    max_prefill_tokens: int
    context_length: int | None
    weight_version: str

    @classmethod
    def parse(cls, arguments: list[str] | None = None) -> EngineOptions:
        parser = argparse.ArgumentParser(
            prog="python -m services.rollout.engines.light",
            description="SGLang's HTTP API over a small batched sampler.",
        )
        add = parser.add_argument
        add("--model", "--model-path", type=Path, required=True, help="Hugging Face folder of a dense Qwen3 model")
        add("--host", default="127.0.0.1")
        add("--port", type=int, default=0, help="0: a free one; the first line of output tells it")
        add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
        add(
            "--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="auto: the folder's own"
        )
        add("--threads", type=_positive, default=1, help="torch threads of a CPU engine")
        add("--max-running-requests", type=_positive, default=256, help="samples in a decode step at most")
        add("--max-total-tokens", type=_positive, help="size of the KV cache; by default from the memory there is")
        add("--max-prefill-tokens", type=_positive, default=8192, help="padded tokens of one prefill batch")
        add("--context-length", type=_positive, help="longest prompt plus completion; by default the model's")
        add("--weight-version", default="default", help="label of the folder's weights")
        values: dict[str, Any] = vars(parser.parse_args(arguments))
        return cls(**values)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value
