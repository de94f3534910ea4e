"""Learning from a teacher: the sampled form as an advantage, and divergences over the vocabulary. Pure.

N tokens, V vocabulary, K the teacher's likeliest tokens. With p the student's and q the teacher's distribution:

    sampled       A_t <- reward_weight A_t + coef (log q_t - log p_t)     p_t constant: the gradient of KL(p || q), on policy
    reverse_kl    KL(p || q) = sum_v p log(p / q)
    forward_kl    KL(q || p)
    jsd           beta KL(q || m) + (1 - beta) KL(p || m),  m = beta q + (1 - beta) p

On-policy distillation: Agarwal et al., arXiv 2306.13649 (GKD); Lu 2025, "On-policy distillation". The top-k form compares the
two on the teacher's K likeliest tokens, with the rest of the vocabulary as one more token (`tail`): a lower bound of the full
divergence, 0 only where both agree on all K. Elsewhere: slime coef 1; prime-rl adds sg(log q - log p) to the advantage; AReaL
0.005 on top of a reward; verl's recipe uses forward KL over the top k without the tail.

Checked against independent numbers by tests/trainer/test_loss_oracle.py and tests/trainer/test_top_k.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from services.trainer.algorithms.reductions import Tokens, column
from shared.algorithms import DistillConfig


def with_teacher(tokens: Tokens, options: DistillConfig) -> Tokens:
    """The tokens with the teacher's part in their advantages."""
    advantages_N = options.reward_weight * tokens.advantages_N
    if options.coef > 0 and options.form == "sampled":
        teacher_N = column(tokens, "teacher_logprobs", "algorithm.distill")
        advantages_N = advantages_N + options.coef * (teacher_N - tokens.logprobs_N.detach())
    return replace(tokens, advantages_N=advantages_N)


def divergence_penalty(tokens: Tokens, options: DistillConfig) -> torch.Tensor | None:
    """[N] what the loss adds for the top-k form, or None."""
    if options.coef == 0 or options.form == "sampled":
        return None
    teacher_NK = column(tokens, "teacher_top_logprobs", "algorithm.distill.form: top_k")
    student_NK = column(tokens, "student_top_logprobs", "algorithm.distill.form: top_k")
    return options.coef * top_k_divergence(student_NK, teacher_NK, options.divergence, options.beta, options.tail)


def divergence(
    student_NV: torch.Tensor, teacher_NV: torch.Tensor, kind: str, beta: float = 0.5, temperature: float = 1.0
) -> torch.Tensor:
    """[N] between two sets of logits over the whole vocabulary, both divided by the temperature."""
    return _between((student_NV / temperature).log_softmax(-1), (teacher_NV / temperature).log_softmax(-1), kind, beta)


def top_k_divergence(
    student_NK: torch.Tensor, teacher_NK: torch.Tensor, kind: str, beta: float = 0.5, tail: bool = True
) -> torch.Tensor:
    """[N] between log-probabilities of the teacher's K likeliest tokens."""
    if tail:
        student_NK, teacher_NK = _with_tail(student_NK), _with_tail(teacher_NK)
    return _between(student_NK, teacher_NK, kind, beta)


def _between(student: torch.Tensor, teacher: torch.Tensor, kind: str, beta: float) -> torch.Tensor:
    if kind == "reverse_kl":
        return _kl(student, teacher)
    if kind == "forward_kl":
        return _kl(teacher, student)
    log_beta = torch.log(torch.tensor([1 - beta, beta], dtype=student.dtype, device=student.device))
    mixture = torch.logaddexp(student + log_beta[0], teacher + log_beta[1])
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)


def _with_tail(logprobs_NK: torch.Tensor) -> torch.Tensor:
    """One more column: the logarithm of what the K tokens leave, at least the rounding of the type."""
    rest_N1 = 1 - logprobs_NK.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs_NK, rest_N1.clamp(min=torch.finfo(rest_N1.dtype).eps).log()], dim=-1)
