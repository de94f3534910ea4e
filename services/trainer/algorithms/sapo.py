"""SAPO: soft adaptive policy optimisation, a smooth gate in place of the clip.

    - (4 / tau) sigmoid(tau (r_t - 1)) A_t,   tau = tau_pos where A_t > 0, tau_neg elsewhere,   mean of sequence means

The gate has slope 1 at r = 1 and flattens on both sides: a token far from its old probability loses its gradient gradually.

Paper: arXiv 2511.20347. Defaults: tau 1.0 / 1.05, old_logprobs rollout. `level: sequence` takes the ratio of GSPO.
The metric counts a token as held back where the gradient of its gate has fallen below nine tenths, 4 s (1 - s) < 0.9.
"""

from __future__ import annotations

from typing import Literal

import torch

from services.trainer.algorithms.reductions import Tokens
from services.trainer.algorithms.terms import Term, sequence_ratio, token_ratio


def sapo(
    tokens: Tokens,
    old_N: torch.Tensor,
    /,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    level: Literal["token", "sequence"] = "token",
) -> Term:
    """The loss of each token."""
    advantages_N = tokens.advantages_N
    ratio_N = token_ratio(tokens, old_N) if level == "token" else sequence_ratio(tokens, old_N)
    tau_N = torch.full_like(advantages_N, tau_neg).masked_fill(advantages_N > 0, tau_pos)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1))
    return Term(-4 / tau_N * gate_N * advantages_N, ratio_N, 4 * gate_N * (1 - gate_N) < 0.9)
