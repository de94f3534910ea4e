"""tests/data/loss_cases.npz: inputs, losses and gradients from an independent implementation in float64, as packed tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.trainer.algorithms.reductions import Tokens

ARCHIVE = np.load(Path(__file__).parents[1] / "data/loss_cases.npz")
CASES: list[dict[str, Any]] = json.loads(str(ARCHIVE["meta"]))["cases"]


def stored(name: str) -> torch.Tensor:
    return torch.from_numpy(ARCHIVE[name])


def array(case: dict[str, Any], name: str) -> torch.Tensor | None:
    key = f"{case['key']}/{name}"
    return stored(key) if key in ARCHIVE else None


def tokens_of(case: dict[str, Any]) -> tuple[Tokens, torch.Tensor, torch.Tensor]:
    """(the case's tokens in packed form, its log-probabilities [B, T] with a gradient, its mask [B, T])."""
    logprobs_BT, mask_BT, advantages = array(case, "logp"), array(case, "comp_mask"), array(case, "adv")
    assert logprobs_BT is not None
    assert mask_BT is not None
    assert advantages is not None
    logprobs_BT.requires_grad_()
    tool_BT, old_BT, sampled_BT, reference_BT = (array(case, name) for name in ("tool_mask", "old", "samp", "ref"))
    mask_BT = mask_BT.bool() if tool_BT is None else (mask_BT * tool_BT).bool()
    advantages_BT = (advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(logprobs_BT)
    before_BT = logprobs_BT.detach() if old_BT is None else old_BT
    rows_N = mask_BT.nonzero()[:, 0]
    tokens = Tokens(
        logprobs_N=logprobs_BT[mask_BT],
        rollout_logprobs_N=(before_BT if sampled_BT is None else sampled_BT)[mask_BT],
        advantages_N=advantages_BT[mask_BT],
        mask_N=torch.ones(len(rows_N), dtype=torch.bool),
        sequence_N=rows_N,
        sequences=len(mask_BT),
        old_logprobs_N=before_BT[mask_BT],
        extras={} if reference_BT is None else {"reference_logprobs": reference_BT[mask_BT]},
    )
    return tokens, logprobs_BT, mask_BT
