"""CISPO: clipped importance sampling policy optimisation.

    - sg(min(max(r_t, floor), cap)) A_t policy_t,   mean over all tokens of the update

The ratio is a constant weight that is capped, not a factor that is clipped: every token keeps its gradient, also the rare ones
that carry a change of mind.

Paper: MiniMax-M1, arXiv 2506.13585. Defaults: cap 5 on the ratio itself, no lower bound, old_logprobs rollout. TRL's
`epsilon_high` is such a cap too, and its default of 0.2 is wrong for it; verl and slime clip to 1 +- 0.2; SkyRL to [0, 5].
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.reductions import Tokens
from services.trainer.algorithms.terms import Term, token_ratio


def cispo(tokens: Tokens, old_N: torch.Tensor, /, *, cap: float = 5.0, floor: float = 0.0) -> Term:
    """The loss of each token."""
    ratio_N = token_ratio(tokens, old_N).detach()
    loss_N = -ratio_N.clamp(floor, cap) * tokens.advantages_N * tokens.logprobs_N
    return Term(loss_N, ratio_N, (ratio_N > cap) | (ratio_N < floor))
