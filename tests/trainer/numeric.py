"""Losses written again in plain numpy, from the papers and token by token, and gradients by central differences.

Nothing here calls the code under test. A loss is a function of the log-probabilities x at which it is evaluated and of x0, the
point at which everything that carries no gradient was computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from services.trainer.algorithms.reductions import Tokens


@dataclass
class Example:
    """A micro-batch as plain arrays. Masked tokens hold NaN wherever a stage may leave it."""

    logprobs: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray
    sequence: np.ndarray
    sequences: int
    extras: dict[str, np.ndarray] = field(default_factory=dict)

    def tokens(self) -> Tokens:
        return Tokens(
            logprobs_N=torch.tensor(self.logprobs, requires_grad=True),
            rollout_logprobs_N=torch.tensor(self.rollout),
            advantages_N=torch.tensor(self.advantages),
            mask_N=torch.tensor(self.mask),
            sequence_N=torch.tensor(self.sequence),
            sequences=self.sequences,
            entropy_N=torch.ones(len(self.logprobs), dtype=torch.float64),
            extras={name: torch.tensor(column) for name, column in self.extras.items()},
        )

    def rows(self) -> list[np.ndarray]:
        """Places of the counted tokens of each sequence."""
        return [np.flatnonzero((self.sequence == s) & self.mask) for s in range(self.sequences)]

    def part(self, sequences: list[int]) -> Example:
        """Only these sequences, in this order."""
        places = [np.flatnonzero(self.sequence == s) for s in sequences]
        order = np.concatenate([np.zeros(0, dtype=int), *places])
        return Example(
            self.logprobs[order],
            self.rollout[order],
            self.advantages[order],
            self.mask[order],
            np.repeat(np.arange(len(sequences)), [len(p) for p in places]),
            len(sequences),
            {name: column[order] for name, column in self.extras.items()},
        )


def example(
    lengths: tuple[int, ...] = (4, 1, 0, 5, 3), *, seed: int = 0, distance: float = 0.5, masked: float = 0.2
) -> Example:
    """Random numbers with every column that any loss asks for."""
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    logprobs = -np.abs(rng.normal(1.5, 0.8, count)) - 0.01
    mask = rng.random(count) > masked
    rollout = np.minimum(logprobs + rng.normal(0, distance, count), -1e-3)
    reference = logprobs + rng.normal(0, 0.4, count)
    top = np.log(rng.dirichlet(np.ones(6), count))[:, :3]
    return Example(
        logprobs,
        np.where(mask, rollout, np.nan),
        rng.normal(0, 1, count),
        mask,
        np.repeat(np.arange(len(lengths)), lengths),
        len(lengths),
        {
            "reference_logprobs": np.where(mask, reference, np.nan),
            "teacher_logprobs": logprobs + rng.normal(0, 0.4, count),
            "age": rng.integers(0, 4, count).astype(float),
            "teacher_top_logprobs": top,
            "student_top_logprobs": np.log(rng.dirichlet(np.ones(6), count))[:, :3],
            "values": rng.normal(0, 1, count),
            "returns": rng.normal(0, 1, count),
        },
    )


def reduced(losses: np.ndarray, case: Example, reduction: str, max_tokens: int) -> tuple[float, float]:
    """(sum, denominator) by plain loops."""
    rows = case.rows()
    listed = [int((case.sequence == s).sum()) for s in range(case.sequences)]
    counted = sum(1 for row, size in zip(rows, listed, strict=True) if len(row) or not size)
    if reduction == "token_mean":
        return float(sum(losses[row].sum() for row in rows)), float(sum(len(row) for row in rows))
    if reduction == "sequence_mean":
        return float(sum(losses[row].mean() for row in rows if len(row))), counted
    total = float(sum(losses[row].sum() for row in rows))
    return total, counted if reduction == "sequence_sum" else counted * max_tokens


def central_differences(function: Callable[[np.ndarray], float], at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """The gradient, one coordinate at a time."""
    gradient = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[place] += step
        down[place] -= step
        gradient[place] = (function(up) - function(down)) / (2 * step)
    return gradient


TokenLoss = Callable[[np.ndarray, np.ndarray, Example], np.ndarray]
"""(x, x0, example) -> the loss of each token, weights and penalties included."""


def clipped(ratio: np.ndarray, advantages: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.array([-min(r * a, min(max(r, 1 - low), 1 + high) * a) for r, a in zip(ratio, advantages, strict=True)])


def truncated(gap: np.ndarray, high: float) -> np.ndarray:
    return np.minimum(np.exp(gap), high)


def dual_clip(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    plain = clipped(np.exp(x - c.rollout), c.advantages, 0.1, 0.15)
    return np.array([min(p, -1.3 * a) if a < 0 else p for p, a in zip(plain, c.advantages, strict=True)])


def reinforce_pp(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    return clipped(np.exp(x - x0), c.advantages, 0.2, 0.2) * truncated(x0 - c.rollout, 2.0)


def rloo(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    return -truncated(x0 - c.rollout, 1.2) * c.advantages * x


def opd(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    advantages = 0.5 * c.advantages + 0.7 * (c.extras["teacher_logprobs"] - x0)
    return -truncated(x0 - c.rollout, 2.0) * advantages * x


def decoupled(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    recent = np.array(
        [b if a <= 1 else b + (a - 1) / a * (p - b) for a, b, p in zip(c.extras["age"], c.rollout, x0, strict=True)]
    )
    weight = np.exp(recent - c.rollout)
    return clipped(np.exp(x - recent), c.advantages, 0.2, 0.2) * np.where(weight > 1.1, 0, weight)


def cispo_floor(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    return -np.clip(np.exp(x0 - c.rollout), 0.8, 1.5) * c.advantages * x


def gspo_token(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    ratio = np.ones_like(x)
    for row in c.rows():
        if len(row):
            ratio[row] = np.exp(np.mean(x0[row] - c.rollout[row])) * np.exp(x[row] - x0[row])
    return clipped(ratio, c.advantages, 0.05, 0.06)


def dppo(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    moved = np.exp(x0) - np.exp(c.rollout)
    keep = np.array([not (m > 0.05 if a > 0 else m < -0.04) for m, a in zip(moved, c.advantages, strict=True)])
    return -(keep * c.advantages) * np.exp(x - c.rollout) + 0.3 * (x - c.rollout) ** 2


def ipo(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    keep = np.abs(np.exp(x0) - np.exp(c.rollout)) <= 0.05
    return -(keep * c.advantages) * np.exp(x - c.rollout) + 1e-3 * (x - c.rollout) ** 2


def harmful(x0: np.ndarray, c: Example) -> list[float]:
    """|log r| of the tokens that would move further away."""
    gaps = [(x0 - c.rollout)[i] for i in np.flatnonzero(c.mask) if c.advantages[i] * (x0 - c.rollout)[i] > 0]
    return sorted(abs(g) for g in gaps)


def m2po_mask(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    """Leave out the largest, one by one, until the mean of the rest keeps the budget."""
    kept = harmful(x0, c)
    while kept and np.mean(np.square(kept)) > 0.04:
        kept.pop()
    bound = max(kept, default=0.0)
    beyond = (c.advantages * (x0 - c.rollout) > 0) & (np.abs(x0 - c.rollout) > bound + 1e-12)
    return np.where(beyond, 0.0, -np.exp(x - c.rollout) * c.advantages)


def m2po_clip(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    """Bisect for the cap that makes the mean of the capped squares equal the budget."""
    squares = np.square(harmful(x0, c))
    low, high = 0.0, float(squares.max())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(squares, middle).mean() < 0.01 else (low, middle)
    radius = np.sqrt(high)
    return clipped(np.exp(x - c.rollout), c.advantages, max(1 - np.exp(-radius), 0.05), max(np.exp(radius) - 1, 0.08))


def whole_sequences(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    """geometric, outlier and opsm together, on REINFORCE without weights."""
    losses = -c.advantages * x
    for row in c.rows():
        gap = x0[row] - c.rollout[row]
        if not len(row):
            continue
        if not 0.7 <= np.exp(gap.mean()) <= 1.3 or (np.exp(gap) < 0.4).any() or (np.exp(gap) > 2.2).any():
            losses[row] = 0
        elif np.mean(c.rollout[row] - x0[row]) > 0.02:
            losses[row] = np.where(c.advantages[row] < 0, 0, losses[row])
    return losses


def kl_unbiased(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    gap = x - c.extras["reference_logprobs"]
    return reinforce_pp(x, x0, c) + 0.3 * np.exp(x - c.rollout) * (np.exp(-gap) - 1 + gap)


def kl_low_var(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    gap = x - c.extras["reference_logprobs"]
    return reinforce_pp(x, x0, c) + 0.3 * np.clip(np.exp(-gap) - 1 + gap, -10, 10)


def kl_k2(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    return reinforce_pp(x, x0, c) + 0.3 * (x - c.extras["reference_logprobs"]) ** 2 / 2


def divergence(student: np.ndarray, teacher: np.ndarray, kind: str, beta: float, tail: bool) -> np.ndarray:
    """Between rows of log-probabilities of K tokens."""
    p, q = np.exp(student), np.exp(teacher)
    if tail:
        p, q = (np.concatenate([part, 1 - part.sum(-1, keepdims=True)], -1) for part in (p, q))
    if kind == "reverse_kl":
        return (p * np.log(p / q)).sum(-1)
    if kind == "forward_kl":
        return (q * np.log(q / p)).sum(-1)
    m = beta * q + (1 - beta) * p
    return beta * (q * np.log(q / m)).sum(-1) + (1 - beta) * (p * np.log(p / m)).sum(-1)


def top_k(x: np.ndarray, x0: np.ndarray, c: Example) -> np.ndarray:
    both = c.extras["student_top_logprobs"], c.extras["teacher_top_logprobs"]
    return -truncated(x0 - c.rollout, 2.0) * c.advantages * x + 0.4 * divergence(*both, "jsd", 0.3, True)
