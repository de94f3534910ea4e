"""The scoring stage on a real broker and a real light engine: columns, what comes behind, failures that are seen, refusals."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.rollout import stage
from services.rollout.scores import ScoreError, score_columns, score_request
from services.trainer import references
from shared import columns, wire
from shared.broker import EmbeddedBroker
from shared.config import ConfigError, RunConfig, parse
from shared.jetstream import Connection
from shared.records import DeadLetter, Event, Group, Receipt, Rewards, Samples, Sampling, floats, ints
from shared.service import Context
from tests.controller.pipeline import open_context
from tests.rollout import tiny
from tests.rollout.conftest import Model
from tests.shared.runs import until

Connect = Callable[..., Awaitable[Connection]]
PROMPT = [5, 6, 7]
COMPLETIONS = [[8, 9, 10], [], [11]]


def run_config(run: str, base: Path, **changes: Any) -> RunConfig:
    data: dict[str, Any] = {"run": run, "steps": 9, "groups_per_step": 4, "samples_per_group": 3, "base": str(base)}
    data |= {"model": {"path": "policy"}, "prompts": {"source": "a.b"}, "drain_timeout_s": 2.0, "workdir": str(base)}
    data |= {"redeliver_after_s": 60.0}
    data |= {
        "reward": {"functions": [{"path": "a.b"}]},
        "rollout": {"max_deliveries": 2, "light": {"max_total_tokens": 4096}},
    }
    return parse(data | changes, "test")


def group(issue: int, completions: list[list[int]] = COMPLETIONS) -> Group:
    """As the reward service hands it on."""
    lengths = [len(completion) for completion in completions]
    ids = [token for completion in completions for token in completion]
    some = [number for number, length in enumerate(lengths) if length]
    samples = Samples(
        lengths=ints(lengths),
        ids=ints(ids),
        logprobs=floats([-1.0] * len(ids)),
        mask=np.ones(len(ids), dtype="|u1"),
        finish=["stop"] * len(lengths),
        texts=[""] * len(lengths),
        span_sample=ints(some),
        span_start=ints([0] * len(some)),
        span_end=ints([lengths[number] for number in some]),
        span_version=ints([1] * len(some)),
        span_step=ints([0] * len(some)),
    )
    scores = floats([1.0, 0.0, 0.5])
    rewards = Rewards(scores, {}, [""] * 3)
    made = Group(
        f"0-{issue}", "train", issue, issue, 0, "p", None, {}, Sampling(3, 8), ints(PROMPT), samples, rewards, scores
    )
    return made


def expected(model: Model) -> np.ndarray:
    rows = [tiny.reference_logprobs(model.reference, PROMPT + one)[-len(one) :] for one in COMPLETIONS if one]
    return torch.cat(rows).numpy()


@asynccontextmanager
async def serving(ctx: Context) -> AsyncIterator[None]:
    task = asyncio.create_task(stage.main(ctx))
    try:
        yield
        if task.done():
            task.result()
    finally:
        ctx.stopping.set()
        await asyncio.wait_for(task, 120)


async def taken(ctx: Context, count: int, stream: str = "advantages") -> list[Group]:
    puller = await ctx.queue.pull(stream, stream, prefetch=8)
    found = []
    while len(found) < count:
        delivery = await puller.next(120)
        assert delivery is not None, f"{len(found)} of {count} groups came"
        found.append(wire.decode(delivery.data, Group))
        await delivery.ack()
    await puller.stop()
    return found


def write(source: Path, target: Path) -> None:
    """A folder that is there is whole."""
    shutil.copytree(source, target.with_name("unfinished"))
    target.with_name("unfinished").rename(target)


async def records(ctx: Context, stream: str, kind: type[Any]) -> list[Any]:
    return [wire.decode(message, kind) async for message, _ in ctx.queue.read(stream)]


@pytest.fixture
def folders(tmp_path: Path, model: Model, other: Model) -> Path:
    shutil.copytree(model.folder, tmp_path / "policy")
    shutil.copytree(other.folder, tmp_path / "teacher")
    return tmp_path


async def test_the_teachers_columns_are_what_its_model_says(
    broker: EmbeddedBroker, connect: Connect, run_name: str, folders: Path, other: Model
) -> None:
    distill = {"name": "opd", "distill": {"form": "top_k"}}
    config = run_config(run_name, folders, algorithm=distill, teacher={"path": "teacher", "top_k": 5})
    ctx = await open_context(await connect(broker.url), config, "teacher", "teacher-0")
    for _ in range(2):  # the second is a repetition of the first, as after a death between storing and acknowledging
        await ctx.queue.publish(ctx.subjects.stage("teacher"), group(0), msg_id="0-0")
    await ctx.queue.publish(ctx.subjects.stage("teacher"), group(1, [[], [], []]), msg_id="0-1")
    async with serving(ctx):
        first, empty = sorted(await taken(ctx, 2), key=lambda one: one.issue)
    assert columns.missing(first, columns.travelling(config)) is None
    assert columns.missing(empty, columns.travelling(config)) is None
    np.testing.assert_allclose(first.columns["teacher_logprobs"], expected(other), atol=1e-4)
    tokens = torch.tensor([PROMPT + COMPLETIONS[0]])
    with torch.no_grad():
        best = other.reference(tokens).logits[0, len(PROMPT) - 1].log_softmax(-1).topk(5)
    assert first.id_columns["teacher_top_ids"][0].tolist() == best.indices.tolist()
    np.testing.assert_allclose(first.columns["teacher_top_logprobs"][0], best.values, atol=1e-4)


async def test_a_group_goes_from_the_teacher_to_the_reference_to_the_trainer(
    broker: EmbeddedBroker, connect: Connect, run_name: str, folders: Path, model: Model, other: Model
) -> None:
    algorithm = {"name": "grpo", "kl": {"coef": 0.1}, "distill": {"coef": 1.0}}
    config = run_config(run_name, folders, algorithm=algorithm, teacher={"path": "teacher"}, reference={})
    assert columns.stages(config) == ["teacher", "reference"]
    teacher = await open_context(await connect(broker.url), config, "teacher", "teacher-0")
    reference = await open_context(await connect(broker.url), config, "reference", "reference-0")
    await teacher.queue.publish(teacher.subjects.stage("teacher"), group(0), msg_id="0-0")
    async with serving(teacher), serving(reference):
        await until(lambda: reference._heartbeat.state == "waiting for weights", "the reference waits", 120)
        write(model.folder, references.folder(config, 0))
        (found,) = await taken(teacher, 1)
        np.testing.assert_allclose(found.columns["teacher_logprobs"], expected(other), atol=1e-4)
        np.testing.assert_allclose(found.columns["reference_logprobs"], expected(model), atol=1e-4)
        write(other.folder, references.folder(config, 3))
        await teacher.queue.publish(teacher.subjects.stage("teacher"), group(1), msg_id="0-1")
        (found,) = await taken(teacher, 1)
        np.testing.assert_allclose(found.columns["reference_logprobs"], expected(other), atol=1e-4)


async def test_what_cannot_be_scored_is_told_counted_and_dropped(
    broker: EmbeddedBroker, connect: Connect, run_name: str, folders: Path
) -> None:
    config = run_config(run_name, folders, algorithm={"name": "opd"}, teacher={"path": "teacher"})
    ctx = await open_context(await connect(broker.url), config, "teacher", "teacher-0")
    await ctx.queue.publish(ctx.subjects.stage("teacher"), group(0, [[8], [9], [tiny.VOCAB + 1]]), msg_id="0-0")
    await ctx.queue.publish(ctx.subjects.stage("teacher"), group(1), msg_id="0-1")
    async with serving(ctx):
        assert [one.id for one in await taken(ctx, 1)] == ["0-1"], "the other group passes"

        async def dropped() -> bool:
            return bool(await records(ctx, "receipts", Receipt))

        await until(dropped, "the drop is on record", 120)
    (receipt,) = await records(ctx, "receipts", Receipt)
    assert (receipt.kind, receipt.group_id, receipt.reason) == ("dropped", "0-0", "dead:teacher")
    assert [letter.stage for letter in await records(ctx, "dead", DeadLetter)] == ["teacher"]
    told = [event for event in await records(ctx, "events", Event) if event.kind == "scoring_failed"]
    assert [event.detail["so_far"] for event in told] == [1, 2]
    assert "outside the vocabulary" in told[0].message


async def test_a_teacher_with_another_vocabulary_is_refused(
    broker: EmbeddedBroker, connect: Connect, run_name: str, folders: Path
) -> None:
    tiny.build(folders / "odd", vocab_size=tiny.VOCAB + 16)
    config = run_config(run_name, folders, algorithm={"name": "opd"}, teacher={"path": "odd"})
    ctx = await open_context(await connect(broker.url), config, "teacher", "teacher-0")
    with pytest.raises(ConfigError, match=r"teacher.path: .*odd: vocab_size is 112, but the policy's .* is 96"):
        await stage.main(ctx)


def test_an_answer_about_other_tokens_makes_no_column() -> None:
    request = score_request(group(0), 0, "r")
    assert request is not None
    assert request["input_ids"] == [PROMPT + COMPLETIONS[0], PROMPT + COMPLETIONS[2]]
    good = [
        {"meta_info": {"input_token_logprobs": [[None, 7, None], *([-0.5, token, None] for token in one)]}}
        for one in COMPLETIONS
        if one
    ]
    found, _ = score_columns(group(0), good, "teacher", 0)
    assert found["teacher_logprobs"].tolist() == [-0.5] * 4
    good[1]["meta_info"]["input_token_logprobs"][-1][1] = 12
    with pytest.raises(ScoreError, match="sample 1: the engine scored other tokens"):
        score_columns(group(0), good, "teacher", 0)
    with pytest.raises(ScoreError, match="asked for 2 samples, the engine answered 1"):
        score_columns(group(0), good[:1], "teacher", 0)
