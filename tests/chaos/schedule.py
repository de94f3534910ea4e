"""Whom to kill, and when: drawn from a seed, so that a schedule that found something can be played again. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

PARTS = (
    "trainer-0",
    "rollout-0",
    "rollout-1",
    "reward-0",
    "controller-0",
    "dcs-0",
    "broker",
    "engine",
    "scorer",
)
HASTY = 0.35
"""The share of strikes that do not wait until the run has got over the one before."""


@dataclass(frozen=True, slots=True)
class Strike:
    """Kill `part`, so many seconds after the run moved on from the last strike, or, if `hasty`, after that strike itself."""

    after_s: float
    part: str
    hasty: bool


def strikes(seed: int, count: int, longest_s: float = 1.5) -> Iterator[Strike]:
    """`count` strikes. Parts come in shuffled rounds, so that each of them is hit about as often."""
    chance = random.Random(f"chaos-{seed}")
    parts: list[str] = []
    for _ in range(count):
        parts = parts or chance.sample(PARTS, len(PARTS))
        yield Strike(chance.uniform(0.0, longest_s), parts.pop(), chance.random() < HASTY)
