"""GSPO: group sequence policy optimisation, one ratio a sequence.

    s = exp(mean_t(policy_t - old_t))
    - min(s A_t, clip(s, 1 - clip_low, 1 + clip_high) A_t),   mean of sequence means

The ratio is that of the sequence's likelihoods to the power 1 / length, so a sequence is clipped whole. `form: token`
(GSPO-token) takes s_t = sg(s) exp(policy_t - sg(policy_t)) instead: the same where A is one number a sequence, and right where
it differs by token, as with a teacher.

Paper: arXiv 2507.18071. Defaults: clip 3e-4 / 4e-4, old_logprobs rollout. Other systems leave their token clip of 0.2 in place,
with which a geometric mean is never clipped. LUSPO, arXiv 2602.05261, is this with `reduction: sequence_sum` and 2e-3 / 3e-3.
"""

from __future__ import annotations

from typing import Literal

import torch

from services.trainer.algorithms.reductions import Tokens
from services.trainer.algorithms.terms import Term, clip, sequence_ratio


def gspo(
    tokens: Tokens,
    old_N: torch.Tensor,
    /,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    form: Literal["sequence", "token"] = "sequence",
) -> Term:
    """The loss of each token."""
    return clip(tokens, sequence_ratio(tokens, old_N, form), clip_low, clip_high)
