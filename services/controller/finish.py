"""Whether the run goes on. Pure.

It is finished when every update has its full batch and the last evaluation is in. It is given up, with a reason that says what to
change, when nothing survives the filters, and, if the run file asks for it, when the policy starts out too weak to learn.
`tests/controller/test_evaluation.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.controller.credits import Credits
from services.controller.evaluation import Evaluations


@dataclass(frozen=True, slots=True)
class Verdict:
    """`may_train`: prompts may be issued. `failed`: why the run is given up."""

    may_train: bool = True
    finished: bool = False
    failed: str = ""


def judge(credits: Credits, evaluations: Evaluations, min_reward: float | None) -> Verdict:
    if credits.done and (not evaluations.prompts or evaluations.complete(evaluations.steps)):
        return Verdict(may_train=False, finished=True)
    if in_a_row := credits.hopeless():
        reasons = ", ".join(f"{reason} {count}" for reason, count in credits.ledger.dropped.most_common())
        return Verdict(
            False,
            failed=f"{in_a_row} groups in a row were dropped and not one survived (all drops: {reasons}): the batch would never "
            "fill; look at the dropped groups' rewards in the trajectories, or relax reward.filters",
        )
    if min_reward is None or credits.ledger.issued:
        return Verdict()
    if not evaluations.complete(0):
        return Verdict(may_train=False)
    mean = evaluations.mean(0)
    if mean is None:
        return Verdict(False, failed="eval.min_reward: not one evaluation group could be scored before the first step")
    if mean < min_reward:
        return Verdict(
            False,
            failed=f"eval.min_reward: the policy starts with a reward of {mean:.4g} on the held-out prompts, below "
            f"{min_reward:g}; one that hardly ever succeeds learns nothing: warm it up, take easier prompts, or lower the field",
        )
    return Verdict()
