"""How a trainer begins: from the newest whole checkpoint, or from the model folder by way of what comes before.

What a checkpoint holds is complete: a resumed trainer needs neither the earlier phases nor any message that the checkpoint
covers. A damaged checkpoint is passed over with an event, never in silence.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.dcs.rollback import Wish
from services.trainer.build import build
from services.trainer.channel import gather
from services.trainer.checkpoint import Checkpoint, CheckpointStore
from services.trainer.intake import Rollback
from services.trainer.preferences import Pair, PreferenceStep, preference_pair, run_preferences
from services.trainer.ranks import RankedPolicy
from services.trainer.roles import Roles
from services.trainer.saving import save
from services.trainer.warm_start import Demonstration, WarmStep, run_warm_start
from services.trainer.window import Window
from services.trainer.wishes import fulfil
from shared import wire
from shared.config import ConfigError, RunConfig
from shared.records import Group, Receipt
from shared.sections import PreferencesConfig, WarmStartConfig
from shared.service import Context
from shared.tokenizer import Tokenizer


class Interrupted(Exception):
    """The service was told to stop before it could begin."""


@dataclass(slots=True)
class Start:
    """Where training begins."""

    policy: RankedPolicy
    roles: Roles
    window: Window[Group]
    step: int
    rollbacks: list[Rollback]
    epoch: int
    """Which trainer of the run this is: the number of its claim on the checkpoints."""
    resumed: bool
    next_issue: int = 0
    """The issue number behind the last group that was trained."""
    damaged_step: int = 0
    """Messages of groups trained before this step may be gone: a checkpoint that is damaged now covered them."""
    damaged_sequence: int = 0
    """The sequence number of that checkpoint."""
    untold: list[Receipt] = field(default_factory=list)
    """Receipts of updates that the checkpoint holds, which may not have been written."""
    wish: Wish | None = None
    """Somebody wanted to go back here."""

    @property
    def reason(self) -> str:
        """Why its weights are published."""
        return self.wish.reason if self.wish else "resume" if self.resumed else "start"


async def begin(ctx: Context, store: CheckpointStore) -> Start:
    """The policy, ready for the next update."""
    config = ctx.config
    await ctx.beat("loading model")
    policy = await ctx.compute(build, config, gather(config))
    try:
        return await _begin_with(ctx, store, policy)
    except BaseException:
        await ctx.compute(policy.close)
        raise


async def _begin_with(ctx: Context, store: CheckpointStore, policy: RankedPolicy) -> Start:
    config = ctx.config
    epoch = await ctx.compute(store.claim)
    wish = await fulfil(ctx, store)
    checkpoint: Checkpoint | None = await ctx.compute(store.load)
    if checkpoint is None:
        await _phases(ctx, policy)
        roles = await ctx.compute(Roles, config, policy)
        await ctx.compute(roles.begin)
        start = Start(policy, roles, Window(config.window), 0, [], epoch, resumed=False)
        meta = meta_of(start.window.state(), [], 0)
        await ctx.compute(save, store, policy.ranks, roles.states, 0, meta)
        return start
    for damage in checkpoint.damaged:
        await ctx.events.publish("checkpoint_damaged", f"{damage.path.name}: {damage.reason}", step=damage.step)
    roles = await ctx.compute(Roles, config, policy)
    await ctx.compute(roles.restore, checkpoint.entry.path, checkpoint.entry.step)
    await ctx.compute(policy.restore, checkpoint.entry.path)
    meta, damaged = checkpoint.meta, store.set_aside(checkpoint.entry.sequence)
    await ctx.events.publish(
        "resumed", f"from the checkpoint of step {checkpoint.entry.step}", step=checkpoint.entry.step
    )
    return Start(
        policy,
        roles,
        Window.restore(meta["window"], config.window),
        checkpoint.entry.step,
        [Rollback(version, step) for version, step in meta["rollbacks"]],
        epoch,
        resumed=True,
        next_issue=meta["next_issue"],
        damaged_step=max((entry.step for entry in damaged), default=0),
        damaged_sequence=max((entry.sequence for entry in damaged), default=0),
        untold=[wire.decode(receipt, Receipt) for receipt in meta.get("untold", ())],
        wish=wish,
    )


def meta_of(window: dict[str, Any], rollbacks: list[Rollback], next_issue: int) -> dict[str, Any]:
    """What a checkpoint holds beside the tensors. `window` says which groups were trained or dropped: all before its head,
    and those it names."""
    told = [[rollback.version, rollback.step] for rollback in rollbacks]
    return {"window": window, "rollbacks": told, "next_issue": next_issue}


Report = Callable[[WarmStep | PreferenceStep], None]


async def _phases(ctx: Context, policy: RankedPolicy) -> None:
    """What comes before reinforcement learning: the supervised phase and the preference phase, each if it is asked for."""
    config, budget = ctx.config, ctx.config.trainer.micro_batch_tokens
    if (warm := config.trainer.warm_start) is not None:
        await _phase(
            ctx,
            "warm_start",
            warm.steps,
            lambda report: run_warm_start(
                policy, demonstrations(config, warm), warm, token_budget=budget, on_step=report
            ),
        )
    if (prefer := config.trainer.preferences) is not None:
        await _phase(
            ctx,
            "preferences",
            prefer.steps,
            lambda report: run_preferences(policy, pairs(config, prefer), prefer, token_budget=budget, on_step=report),
        )
    if warm or prefer:
        await ctx.compute(policy.reset_optimizer, config.trainer.optimizer)


async def _phase(ctx: Context, name: str, steps: int, work: Callable[[Report], Any]) -> None:
    """One phase, with its progress told. Told to stop in the middle of it, the service leaves and a later one does it anew."""
    newest: list[WarmStep | PreferenceStep] = []

    def report(step: WarmStep | PreferenceStep) -> None:
        newest[:] = [step]
        if ctx.stopping.is_set():
            raise Interrupted(f"stopped in the phase {name}, at update {step.step} of {step.steps}")

    await ctx.events.publish(name, f"{steps} updates begin", steps=steps)
    started, task = time.monotonic(), asyncio.create_task(ctx.compute(work, report))
    while not task.done():
        await asyncio.wait({task}, timeout=1.0)
        done, loss = (newest[0].step, newest[0].loss) if newest else (0, float("nan"))
        await ctx.beat(name.replace("_", " "), progress=done, steps=steps)
        ctx.metrics.emit(step=None, **{f"{name}_step": done, f"{name}_steps": steps, f"{name}_loss": loss})
    task.result()
    took = time.monotonic() - started
    loss = newest[0].loss if newest else float("nan")
    await ctx.events.publish(f"{name}_done", f"loss {loss:.3f} after {took:.1f} s", loss=loss)


def demonstrations(config: RunConfig, options: WarmStartConfig) -> Iterable[Demonstration]:
    """Tokenised demonstrations: those of a file, in an order drawn from the seed, or those that a function makes one by one."""
    tokenizer = Tokenizer(config.path(config.model.path))

    def tokenise(record: dict[str, Any]) -> Demonstration:
        return tokenizer.encode_prompt(record["prompt"]), tokenizer.encode_completion(record["completion"])

    records = _records(config, options.source, "trainer.warm_start.source", ("completion",))
    return [tokenise(record) for record in records] if isinstance(records, list) else map(tokenise, records)


def pairs(config: RunConfig, options: PreferencesConfig) -> Iterable[Pair]:
    """Tokenised preference pairs, from a file or a function, likewise."""
    tokenizer = Tokenizer(config.path(config.model.path))
    records = _records(config, options.source, "trainer.preferences.source", ("chosen", "rejected"))
    for number, record in enumerate(records):
        better, worse = (tokenizer.encode_completion(record[name]) for name in ("chosen", "rejected"))
        yield preference_pair(tokenizer.encode_prompt(record["prompt"]), better, worse, name=f"pair-{number}")


def _records(config: RunConfig, source: str, field: str, texts: tuple[str, ...]) -> Iterable[dict[str, Any]]:
    """A list from a file, endless from a function."""
    if source.endswith(".jsonl"):
        records = _read_file(config.path(source), field, texts)
        random.Random(config.seed).shuffle(records)
        return records
    make = config.function(source, field)
    return (make(config.seed, index) for index in itertools.count())


def _read_file(path: Path, field: str, texts: tuple[str, ...]) -> list[dict[str, Any]]:
    records = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: cannot read {path} ({error})") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: not JSON ({error})") from error
        whole = isinstance(record, dict) and "prompt" in record
        if not whole or not all(isinstance(record.get(name), str) for name in texts):
            raise ConfigError(
                f"{path}:{number}: expected an object with {', '.join(f'`{name}`' for name in ('prompt', *texts))}"
            )
        records.append(record)
    if not records:
        raise ConfigError(f"{field}: {path} is empty")
    return records
