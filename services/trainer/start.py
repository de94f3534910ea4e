"""How a trainer begins: from the newest whole checkpoint, or from the model folder by way of the supervised phase.

What a checkpoint holds is complete: a resumed trainer needs neither the supervised phase nor any message that the checkpoint
covers. A damaged checkpoint is passed over with an event, never in silence.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.trainer.checkpoint import Checkpoint, CheckpointStore
from services.trainer.intake import Rollback
from services.trainer.megatron.policy import Policy
from services.trainer.warm_start import Demonstration, WarmStep, run_warm_start
from services.trainer.window import Window
from shared.config import ConfigError, RunConfig, WarmStartConfig
from shared.records import Group
from shared.service import Context
from shared.tokenizer import Tokenizer


class Interrupted(Exception):
    """The service was told to stop before it could begin."""


@dataclass(slots=True)
class Start:
    """Where training begins."""

    policy: Policy
    window: Window[Group]
    step: int
    rollbacks: list[Rollback]
    resumed: bool
    acknowledged: int = 0
    """Messages of groups trained before this step may be gone: a checkpoint that is damaged now covered them."""


def device_of(config: RunConfig) -> str:
    """cuda or cpu, as `trainer.device` says."""
    if config.trainer.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.trainer.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device: cuda, but torch sees no GPU here; set it to auto or cpu")
    return config.trainer.device


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


async def begin(ctx: Context, store: CheckpointStore) -> Start:
    """The policy, ready for the next update."""
    config = ctx.config
    await ctx.beat("loading model")
    seed_everything(config.seed)
    policy = await ctx.compute(_build, config)
    checkpoint: Checkpoint | None = await ctx.compute(store.load)
    if checkpoint is None:
        if config.trainer.warm_start is not None:
            await _warm_up(ctx, policy, config.trainer.warm_start)
        start = Start(policy, Window(config.window), 0, [], resumed=False)
        await ctx.compute(store.save, 0, policy.state_dict(), meta_of(start.window.state(), []))
        return start
    for damage in checkpoint.damaged:
        await ctx.events.publish("checkpoint_damaged", f"{damage.path.name}: {damage.reason}", step=damage.step)
    await ctx.compute(policy.load_state_dict, checkpoint.tensors)
    meta = checkpoint.meta
    await ctx.events.publish(
        "resumed", f"from the checkpoint of step {checkpoint.entry.step}", step=checkpoint.entry.step
    )
    return Start(
        policy,
        Window.restore(meta["window"], config.window),
        checkpoint.entry.step,
        [Rollback(version, step) for version, step in meta["rollbacks"]],
        resumed=True,
        acknowledged=max((damage.step for damage in checkpoint.damaged), default=0),
    )


def meta_of(window: dict[str, Any], rollbacks: list[Rollback]) -> dict[str, Any]:
    """What a checkpoint holds beside the tensors. `window` says which groups were trained or dropped: all before its head,
    and those it names."""
    return {"window": window, "rollbacks": [[rollback.version, rollback.step] for rollback in rollbacks]}


def _build(config: RunConfig) -> Policy:
    torch.use_deterministic_algorithms(config.deterministic, warn_only=True)
    return Policy.create(
        config.path(config.model.path), config.trainer, device_of(config), dtype=config.model.dtype, seed=config.seed
    )


async def _warm_up(ctx: Context, policy: Policy, options: WarmStartConfig) -> None:
    """The supervised phase. Told to stop in the middle of it, the service leaves and a later one does it anew."""
    config, newest = ctx.config, [WarmStep(0, options.steps, float("nan"), 0.0, 0.0, 0)]

    def on_step(step: WarmStep) -> None:
        newest[0] = step
        if ctx.stopping.is_set():
            raise Interrupted(f"stopped in the supervised phase, at update {step.step} of {step.steps}")

    def work() -> None:
        stream = demonstrations(config, options)
        run_warm_start(policy, stream, options, token_budget=config.trainer.micro_batch_tokens, on_step=on_step)
        policy.reset_optimizer(config.trainer.optimizer)

    await ctx.events.publish("warm_start", f"{options.steps} supervised updates begin", steps=options.steps)
    started, task = time.monotonic(), asyncio.create_task(ctx.compute(work))
    while not task.done():
        await asyncio.wait({task}, timeout=1.0)
        last = newest[0]
        await ctx.beat("warm start", progress=last.step, steps=last.steps)
        ctx.metrics.emit(warm_start_step=last.step, warm_start_steps=last.steps, warm_start_loss=last.loss)
    task.result()
    took = time.monotonic() - started
    await ctx.events.publish("warm_start_done", f"loss {newest[0].loss:.3f} after {took:.1f} s", loss=newest[0].loss)


def demonstrations(config: RunConfig, options: WarmStartConfig) -> Iterable[Demonstration]:
    """Tokenised demonstrations: those of a file, in an order drawn from the seed, or those that a function makes one by one."""
    tokenizer = Tokenizer(config.path(config.model.path))

    def tokenise(record: dict[str, Any]) -> Demonstration:
        return tokenizer.encode_prompt(record["prompt"]), tokenizer.encode_completion(record["completion"])

    if options.source.endswith(".jsonl"):
        records = _read_file(config.path(options.source))
        random.Random(config.seed).shuffle(records)
        return [tokenise(record) for record in records]
    make = config.function(options.source, "trainer.warm_start.source")
    return (tokenise(make(config.seed, index)) for index in itertools.count())


def _read_file(path: Path) -> list[dict[str, Any]]:
    records = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trainer.warm_start.source: cannot read {path} ({error})") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(record, dict) or "prompt" not in record or not isinstance(record.get("completion"), str):
            raise ConfigError(f"{path}:{number}: expected an object with `prompt` and `completion`")
        records.append(record)
    if not records:
        raise ConfigError(f"trainer.warm_start.source: {path} holds no demonstration")
    return records
