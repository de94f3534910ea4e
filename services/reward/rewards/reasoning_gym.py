"""Score by the task's own checker, for prompts of the source `reasoning_gym:NAME`.

    reward:
      functions:
        - path: services.reward.rewards.reasoning_gym.score

The item is made again from what the prompt source left in `meta`, so its checker sees all it needs. Some tasks give partial
credit; some have several right answers.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any


def score(completion: str, meta: dict[str, Any], tag: str | None = None) -> float:
    """What the task's checker says, 0 to 1. With `tag`, only what stands between the last <tag> and </tag> is the answer."""
    item = meta.get("reasoning_gym")
    if item is None:
        raise ValueError("meta has no 'reasoning_gym': this reward needs prompts of a reasoning_gym:NAME source")
    answer = completion.strip() if tag is None else _between(completion, tag)
    dataset = _dataset(item["task"], item["seed"], item["size"], json.dumps(item["options"], sort_keys=True))
    return float(dataset.score_answer(answer, dataset[item["index"]]))


def _between(text: str, tag: str) -> str | None:
    _, opened, rest = text.rpartition(f"<{tag}>")
    inside, closed, _ = rest.partition(f"</{tag}>")
    return inside.strip() if opened and closed else None


@lru_cache(maxsize=64)
def _dataset(task: str, seed: int, size: int, options: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(options))
