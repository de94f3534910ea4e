"""RLOO: REINFORCE with a leave-one-out baseline.

    - w_t A policy_t,   A = R_i - mean of the group's other rewards,   mean over all tokens of the update

There is no ratio and no clip; the correction's weight w_t (truncated at 2) is what acts on stale tokens, so the loss can be used
at any staleness.

Paper: Ahmadian et al., "Back to basics", arXiv 2402.14740; Kool et al. 2019. Elsewhere: TRL's trainer clips a sequence ratio and
takes the KL from the reward (`kl: {use: reward, estimator: k1}` here); Relax allows it at staleness 0 only.
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.reductions import Tokens
from services.trainer.algorithms.terms import Term, token_ratio


def rloo(tokens: Tokens, old_N: torch.Tensor, /) -> Term:
    """The loss of each token."""
    ratio_N = token_ratio(tokens, old_N).detach()
    return Term(-tokens.advantages_N * tokens.logprobs_N, ratio_N, torch.zeros_like(tokens.mask_N))
