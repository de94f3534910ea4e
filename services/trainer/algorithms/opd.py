"""OPD: on-policy distillation from a teacher, alone or on top of a reward.

    - w_t (reward_weight A_t + coef (log q_t - log p_t)) policy_t        q: the teacher's, p: the policy's, as a constant

The student samples, the teacher scores the sampled tokens, and each token's advantage is the teacher's log-probability minus the
student's: on policy the gradient of KL(p || q). Stale tokens are weighted by w_t (truncated at 2), and p is today's policy, not
the one that sampled. `distill.form: top_k` adds a divergence over the teacher's likeliest tokens instead (distill.py).

Papers: GKD, arXiv 2306.13649; MiniLLM, arXiv 2306.08543; Lu 2025, "On-policy distillation". Defaults: coef 1, reward_weight 0.
slime: coef 1 with the student's old log-probability; prime-rl masks tokens whose probability fell by 0.2 and adds 1e-3 (log r)^2.
"""

from __future__ import annotations

import torch

from services.trainer.algorithms.reductions import Tokens
from services.trainer.algorithms.terms import Term, token_ratio


def opd(tokens: Tokens, old_N: torch.Tensor, /) -> Term:
    """The loss of each token; the teacher is in its advantage already."""
    ratio_N = token_ratio(tokens, old_N).detach()
    return Term(-tokens.advantages_N * tokens.logprobs_N, ratio_N, torch.zeros_like(tokens.mask_N))
