"""DPO: direct preference optimisation on pairs of a chosen and a rejected completion.

    - log sigmoid(beta ((chosen - chosen_ref) - (rejected - rejected_ref))),   mean over pairs

each a sum of log-probabilities over the completion's tokens, ref those of the reference. The columns `pair` (a number for each
pair, any) and `chosen` (1 or -1) say which tokens belong together; both completions of a pair must be in one micro-batch
(`Packer.add` keeps what it is given together).

Paper: arXiv 2305.18290. Defaults: beta 0.1, no label smoothing, as in TRL. Label smoothing e (conservative DPO): a share e of the
pairs counts the other way round.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from services.trainer.algorithms.reductions import Tokens, cleared, column


def dpo(
    tokens: Tokens, /, *, beta: float = 0.1, label_smoothing: float = 0.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss sum, metric sums) of one micro-batch."""
    tokens = cleared(tokens)
    reference_N, chosen_N = (column(tokens, name, "dpo") for name in ("reference_logprobs", "chosen"))
    pairs, pair_N = column(tokens, "pair", "dpo")[tokens.mask_N].unique(return_inverse=True)
    gap_N = ((tokens.logprobs_N - reference_N) * chosen_N)[tokens.mask_N]
    margin_P = beta * gap_N.new_zeros(len(pairs)).index_add(0, pair_N, gap_N)
    loss = -((1 - label_smoothing) * F.logsigmoid(margin_P) + label_smoothing * F.logsigmoid(-margin_P)).sum()
    count = torch.tensor(float(len(pairs)), dtype=margin_P.dtype, device=margin_P.device)
    metrics = {
        "loss": loss.detach(),
        "denominator": count,
        "tokens": tokens.mask_N.sum(),
        "pairs": count,
        "pair_accuracy": (margin_P.detach() > 0).to(margin_P.dtype).sum(),
    }
    return loss, metrics
