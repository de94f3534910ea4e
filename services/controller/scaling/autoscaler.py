"""How many rollouts a run should have: a pure policy over looks at the run. tests/controller/test_autoscaler.py.

Out, when for `hold_out_s` the trainer has waited for groups more than `idle_out` of its time and more replicas could help:
prompts wait that nobody has taken, or the engines are as good as full. Where neither holds, the staleness bound is what is
waited for, and a newcomer would find nothing to do. As many as would close the gap, `most_at_once` at the most.

In, when for `hold_in_s` the trainer has hardly waited (less than `idle_in`) and no prompt has, and either the others could carry
the engines' load without being full, or samples age to within `slack_in` of the bound before they are trained on. One at a time.

Never below `min_replicas` or above `max_replicas`; nothing while an operation goes on or within the pause after the last
decision; a look that knows too little, or that comes late, begins the holding anew. A dry run decides the same and does nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shared.sections import AutoscaleConfig

LATE = 3.0
"""Looks that are so many intervals apart prove nothing about the time between them."""
FULL = 0.9
"""What the engines' load may become by a scale-in."""


@dataclass(frozen=True, slots=True)
class Load:
    """One look."""

    at: float
    replicas: int
    """There or on their way."""
    waiting: int | None
    """Prompts that no replica has taken."""
    idle: float | None
    """Share of its time that the trainer waited for groups since the look before."""
    busy: float | None
    """Groups being sampled, as a share of what the replicas may work on at once."""
    slack: float | None
    """Updates between the mean age of what is trained on and the bound."""
    slots: int
    """Groups that may be on the way at once: more replicas than these have nothing to do."""
    operating: bool = False
    """A scale operation of this role goes on."""

    @property
    def known(self) -> bool:
        return None not in (self.waiting, self.idle, self.busy, self.slack)


@dataclass(frozen=True, slots=True)
class Memory:
    """What the policy keeps from look to look."""

    out_since: float | None = None
    in_since: float | None = None
    looked: float | None = None
    quiet_until_out: float = float("-inf")
    quiet_until_in: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Decision:
    """`target` None: leave it as it is."""

    target: int | None
    why: str


def decide(load: Load, rules: AutoscaleConfig, memory: Memory) -> tuple[Decision, Memory]:
    """The decision, and what to remember."""
    if why := unusable(load, rules, memory):
        return Decision(None, why), replace(memory, out_since=None, in_since=None, looked=load.at)
    more, less = short(load, rules), ample(load, rules)
    out_since = (load.at if memory.out_since is None else memory.out_since) if more else None
    in_since = (load.at if memory.in_since is None else memory.in_since) if less else None
    memory = replace(memory, out_since=out_since, in_since=in_since, looked=load.at)
    bounded = min(max(load.replicas, rules.min_replicas), rules.max_replicas)
    if bounded != load.replicas:
        return _act(load, rules, bounded, f"the bounds are {rules.min_replicas} to {rules.max_replicas}")
    held_out = out_since is not None and load.at - out_since >= rules.hold_out_s and load.at >= memory.quiet_until_out
    if held_out and (target := wanted(load, rules)) > load.replicas:
        return _act(load, rules, target, more)
    held_in = in_since is not None and load.at - in_since >= rules.hold_in_s and load.at >= memory.quiet_until_in
    if held_in and load.replicas > rules.min_replicas:
        return _act(load, rules, load.replicas - 1, less)
    return Decision(None, more or less or "as it should be"), memory


def unusable(load: Load, rules: AutoscaleConfig, memory: Memory) -> str:
    """Why nothing can be concluded from this look, or ''."""
    if load.operating:
        return "an operation goes on"
    if memory.looked is not None and not 0 <= load.at - memory.looked <= LATE * rules.every_s:
        return "the last look is too old"
    return "" if load.known else "not enough is known"


def short(load: Load, rules: AutoscaleConfig) -> str:
    """Why there are too few, or ''."""
    assert load.idle is not None
    assert load.waiting is not None
    assert load.busy is not None
    if load.idle <= rules.idle_out or not (load.waiting or load.busy >= rules.busy_out):
        return ""
    return (
        f"the trainer waits {load.idle:.0%} of its time, {load.waiting} prompts wait, engines are {load.busy:.0%} busy"
    )


def ample(load: Load, rules: AutoscaleConfig) -> str:
    """Why there are too many, or ''."""
    assert load.idle is not None
    assert load.busy is not None
    assert load.slack is not None
    if load.idle >= rules.idle_in or load.waiting or load.replicas < 2:
        return ""
    after = load.busy * load.replicas / (load.replicas - 1)
    if load.busy < rules.busy_in and after < FULL:
        return f"the trainer waits {load.idle:.0%} of its time, engines are {load.busy:.0%} busy"
    if load.slack < rules.slack_in:
        return f"the trainer waits {load.idle:.0%} of its time, samples age to within {load.slack:.2f} updates of the bound"
    return ""


def wanted(load: Load, rules: AutoscaleConfig) -> int:
    """Replicas that would close the trainer's gap, as far as there is work for them."""
    assert load.idle is not None
    ideal = math.ceil(load.replicas / max(1.0 - load.idle, 0.05)) if load.replicas else 1
    return min(ideal, load.replicas + rules.most_at_once, rules.max_replicas, max(load.slots, 1))


def _act(load: Load, rules: AutoscaleConfig, target: int, why: str) -> tuple[Decision, Memory]:
    quiet_out, quiet_in = load.at + rules.pause_out_s, load.at + rules.pause_in_s
    return Decision(target, why), Memory(None, None, load.at, quiet_out, quiet_in)
