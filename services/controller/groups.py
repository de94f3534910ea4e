"""From a prompt and its ticket to the group that is published. Pure."""

from __future__ import annotations

import hashlib
import time

from services.controller.credits import Ticket
from services.controller.prompts import Prompt
from shared.config import RunConfig
from shared.records import Group, Receipt, Sampling


def train_group(config: RunConfig, ticket: Ticket, prompt: Prompt) -> Group:
    return Group(
        id=ticket.group_id,
        kind="train",
        issue=ticket.issue,
        seat=ticket.seat,
        min_step=ticket.min_step,
        prompt=prompt.prompt,
        answer=prompt.answer,
        meta=prompt.meta,
        sampling=_sampling(config, ticket.group_id, config.samples_per_group, config.sampling.temperature),
        times={"issued": time.time()},
    )


def eval_group(config: RunConfig, step: int, index: int, prompt: Prompt) -> Group:
    """Drawn under the weights of `step` or newer ones; the receipt says which."""
    group_id = f"eval-{step}-{index}"
    return Group(
        id=group_id,
        kind="eval",
        issue=-1,
        seat=-1,
        min_step=step,
        prompt=prompt.prompt,
        answer=prompt.answer,
        meta=prompt.meta,
        sampling=_sampling(config, group_id, config.eval.samples, config.eval.temperature),
        times={"issued": time.time()},
    )


def issued_receipt(ticket: Ticket) -> Receipt:
    return Receipt("issued", ticket.group_id, ticket.issue, ticket.seat, ticket.min_step, at=time.time())


def sampling_seed(run_seed: int, group_id: str) -> int:
    """A seed of the group's own, the same on every replica and at every delivery."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{group_id}".encode()).digest()[:4], "little") >> 1


def _sampling(config: RunConfig, group_id: str, samples: int, temperature: float) -> Sampling:
    return Sampling(
        n=samples,
        max_new_tokens=config.sampling.max_new_tokens,
        temperature=temperature,
        top_p=config.sampling.top_p,
        seed=sampling_seed(config.seed, group_id) if config.deterministic else None,
    )
