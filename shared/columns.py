"""The columns that stages with a model add to a group, one number or K of them a token. Pure.

    reference_logprobs    [N]     role reference: log-probability of the sampled token under the reference policy
    teacher_logprobs      [N]     role teacher: the same under the teacher
    teacher_top_ids       [N, K]  role teacher: its K likeliest tokens at each position (`Group.id_columns`)
    teacher_top_logprobs  [N, K]  their log-probabilities under the teacher
    values                [N]     role critic: value of the state that the token was drawn in

All log-probabilities are taken at `sampling.temperature`. Tokens that an environment wrote have an entry too, of any value. A
group whose column is missing or of the wrong shape is refused (`missing`), never trained on as if the term were not there: a
teacher or a reference that fails is seen. An entry that is not finite leaves that token out of the loss, and is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shared.config import RunConfig
    from shared.records import Group


WIDE = frozenset({"teacher_top_ids", "teacher_top_logprobs"})
"""Columns with a second dimension, also where it is 1."""


def needed(run: RunConfig) -> dict[str, int]:
    """Column -> entries a token, of every group that is trained on."""
    options = run.algorithm
    columns = {}
    if options.kl.coef > 0:
        columns["reference_logprobs"] = 1
    if options.distill.coef > 0:
        columns["teacher_logprobs"] = 1
        if options.distill.form == "top_k" and run.teacher is not None:
            columns |= {"teacher_top_ids": run.teacher.top_k, "teacher_top_logprobs": run.teacher.top_k}
    if options.advantage.name == "gae":
        columns["values"] = 1
    return columns


def travelling(run: RunConfig) -> dict[str, int]:
    """Those of them that a group brings along. The critic, and a reference with `place: trainer`, add theirs in the trainer."""
    inside = {"values"} if "reference" in stages(run) else {"values", "reference_logprobs"}
    return {name: width for name, width in needed(run).items() if name not in inside}


def stages(run: RunConfig) -> list[str]:
    """The roles that have a process of their own between reward and trainer, in the order in which a group passes them."""
    options = run.algorithm
    roles = ["teacher"] if options.distill.coef > 0 and run.teacher is not None else []
    if options.kl.coef > 0 and run.reference is not None and run.reference.place == "service":
        roles.append("reference")
    return roles


def added_by(role: str, run: RunConfig) -> dict[str, int]:
    """The columns that the stage `role` adds."""
    return {name: width for name, width in needed(run).items() if name.startswith(f"{role}_")}


def next_stage(run: RunConfig, after: str | None = None) -> str | None:
    """Where a group goes once `after` (None: the reward service) is done with it; None: to the trainer."""
    roles = stages(run)
    rest = roles if after is None else roles[roles.index(after) + 1 :]
    return rest[0] if rest else None


def missing(group: Group, expected: Mapping[str, int]) -> str | None:
    """Why the trainer must refuse this group, or None. `expected`: `travelling` on arrival, `needed` before training."""
    have: dict[str, np.ndarray] = {**group.columns, **group.id_columns}
    for name, width in expected.items():
        if name not in have:
            return (
                f"{group.id}: the column {name!r} is missing; its stage must add it before the trainer takes the group"
            )
        shape = (width,) if name in WIDE else ()
        if have[name].shape[1:] != shape:
            return f"{group.id}: the column {name!r} has the shape {have[name].shape}, expected {shape} a token"
    return None
