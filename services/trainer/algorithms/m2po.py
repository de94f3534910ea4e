"""M2PO: second-moment trust policy optimisation, for very stale tokens.

    - min(r_t A_t, clip(r_t, low, high) A_t),   r_t = exp(policy_t - rollout_t),   [low, high] = [exp(-radius), exp(radius)]

The radius is solved once an update over all its tokens (`m2po_radius`), so that the second moment of the harmful log-ratios
H = {A > 0, r > 1} + {A < 0, r < 1} keeps a budget, and is infinite where it does already:

    mask   leave out the largest until the mean of the rest is within the budget (the paper's algorithm 1)
    clip   min over H at radius: mean_H min((log r)^2, radius^2) = budget (the released code, and Relax)

The band is never tighter than the floors. It depends on the whole update, so the trainer makes a first pass without gradients
(`services.trainer.algorithms.first_pass`); a band solved in each micro-batch would make the gradient depend on the split.

Paper: arXiv 2510.01161, budget 0.04, group-normalised advantages. Relax: clip, 0.01, floors 0.3 / 0.5, raw rewards.
"""

from __future__ import annotations

import math

import torch

from services.trainer.algorithms.reductions import Tokens
from services.trainer.algorithms.terms import Term, clip, log_ratio, token_ratio


def m2po(
    tokens: Tokens, old_N: torch.Tensor, /, *, radius: float, floor_low: float = 0.0, floor_high: float = 0.0
) -> Term:
    """The loss of each token. `radius`: of the whole update."""
    low = max(1 - math.exp(-radius), floor_low)
    high = max(math.expm1(radius) if radius < 700 else math.inf, floor_high)
    return clip(tokens, token_ratio(tokens, old_N), low, high)


@torch.no_grad()
def m2po_radius(seen: list[tuple[Tokens, torch.Tensor]], *, budget: float = 0.04, rule: str = "mask") -> float:
    """The largest |log r| that a harmful token of the update may have. `seen`: (tokens, old_N) of every micro-batch."""
    moments = [_harmful_moments(tokens, old_N) for tokens, old_N in seen]
    sorted_H = torch.cat(moments).double().sort().values if moments else torch.zeros(0)
    count = len(sorted_H)
    if count == 0 or float(sorted_H.mean()) <= budget:
        return math.inf
    below_H = sorted_H.cumsum(0)
    if rule == "mask":
        kept = int((below_H / torch.arange(1, count + 1, device=below_H.device) <= budget).sum())
        # Halfway to the first that is left out, so that rounding between the two passes decides nothing.
        return (math.sqrt(float(sorted_H[kept - 1])) + math.sqrt(float(sorted_H[kept]))) / 2 if kept else 0.0
    # With the k smallest whole and the others at the cap c: below_k + (H - k) c = H budget; the first k whose c fits is it.
    left_H = torch.arange(count, 0, -1, device=below_H.device)
    cap_H = (count * budget - (below_H - sorted_H)) / left_H
    return math.sqrt(float(cap_H[int((cap_H <= sorted_H).nonzero()[0])]))


def _harmful_moments(tokens: Tokens, old_N: torch.Tensor) -> torch.Tensor:
    """[H] (log r)^2 of the tokens whose update would move them further from the policy that sampled."""
    gap_N = log_ratio(tokens, old_N)
    harmful_N = ((tokens.advantages_N > 0) & (gap_N > 0)) | ((tokens.advantages_N < 0) & (gap_N < 0))
    return gap_N[harmful_N & tokens.mask_N].square()
