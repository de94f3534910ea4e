"""Losses, one file each: pure functions from tokens to (sum to be minimised, metric sums).

`policy_loss` is the only place where a run file's `algorithm.name` becomes a function. A new algorithm is a new file with a
term (terms.py), a class in shared/algorithms.py whose fields are the term's keywords, and a line in `TERMS`.
policy_gradient.py puts the parts together; sft.py, dpo.py and `ppo.critic` are losses of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial

from services.trainer.algorithms.cispo import cispo
from services.trainer.algorithms.dapo import dapo
from services.trainer.algorithms.decoupled_ppo import decoupled_ppo
from services.trainer.algorithms.dppo import dppo
from services.trainer.algorithms.dr_grpo import dr_grpo
from services.trainer.algorithms.grpo import grpo
from services.trainer.algorithms.gspo import gspo
from services.trainer.algorithms.m2po import m2po, m2po_radius
from services.trainer.algorithms.opd import opd
from services.trainer.algorithms.policy_gradient import inputs, policy_gradient
from services.trainer.algorithms.ppo import ppo
from services.trainer.algorithms.reductions import Loss, Tokens
from services.trainer.algorithms.reinforce_pp import reinforce_pp
from services.trainer.algorithms.rloo import rloo
from services.trainer.algorithms.sapo import sapo
from services.trainer.algorithms.terms import Term
from services.trainer.algorithms.vespo import vespo
from shared.algorithms import M2poConfig, PolicyOptions

TERMS: dict[str, Callable[..., Term]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "sapo": sapo,
    "cispo": cispo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp,
    "ppo": ppo,
    "decoupled_ppo": decoupled_ppo,
    "m2po": m2po,
    "dppo": dppo,
    "vespo": vespo,
    "opd": opd,
}
"""`algorithm.name` of the run file -> the loss of each token."""


def policy_loss(options: PolicyOptions, constants: Mapping[str, float] | None = None) -> Loss:
    """The loss that the run file asks for. `constants`: what `first_pass` found, for an algorithm that needs it."""
    term = TERMS[options.name]
    keywords = {
        name: getattr(options, name)
        for name, parameter in inspect.signature(term).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and hasattr(options, name)
    }
    return partial(policy_gradient, term=partial(term, **keywords, **(constants or {})), options=options)


def needs_first_pass(options: PolicyOptions) -> bool:
    """The loss depends on all tokens of the update: call `first_pass` before the first micro-batch."""
    return isinstance(options, M2poConfig)


def first_pass(options: PolicyOptions, batches: list[Tokens]) -> dict[str, float]:
    """The constants of an update, from the tokens of all its micro-batches on all ranks, without gradients."""
    if isinstance(options, M2poConfig):
        seen = [inputs(tokens, options) for tokens in batches]
        return {"radius": m2po_radius(seen, budget=options.budget, rule=options.rule)}
    return {}
