"""New weights: beside the running ones, verified, switched between two steps; every token's log-probability is of its version."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import safetensors.torch
import torch
from safetensors.torch import load_file

from services.dcs.digest import TensorSpec, digest, dtype_name, tensor_checksum
from services.rollout.engines.client import EngineError
from tests.contract.conftest import TOLERANCE, Model, Served
from tests.rollout import tiny
from tests.rollout.publisher import GROUP, TIMEOUT_S, halves
from tests.rollout.tiny import PROMPTS, logprobs_of, reference_logprobs

pytestmark = pytest.mark.asyncio(loop_scope="session")


def specs(folder: Path) -> list[TensorSpec]:
    tensors = load_file(folder / "model.safetensors")
    return [
        TensorSpec(name, dtype_name(tensor), tuple(tensor.shape), tensor_checksum(tensor))
        for name, tensor in sorted(tensors.items())
    ]


def check_spans(prompt: list[int], answer: dict[str, Any], weights: dict[str, Model]) -> None:
    """Each span's log-probabilities are those of its version's weights, recomputed from the start."""
    assert "".join(span["version"] for span in answer["meta_info"]["weight_versions"]) == "".join(weights)
    covered = 0
    for span in answer["meta_info"]["weight_versions"]:
        assert span["start"] == covered < span["end"]
        covered = span["end"]
        reference = weights[span["version"]].reference
        expected = reference_logprobs(reference, prompt + answer["output_ids"])[len(prompt) - 1 :]
        cut = slice(span["start"], span["end"])
        torch.testing.assert_close(logprobs_of(answer)[cut], expected[cut], atol=2 * TOLERANCE, rtol=0)
    assert covered == len(answer["output_ids"])


async def test_checksums_are_of_the_hugging_face_tensors(engine: Served, a: Model) -> None:
    live = await engine.client.checksums()
    assert not live.staged
    assert live.tensors == {spec.name: spec.sha256 for spec in specs(a.folder)}
    assert live.digest == digest(specs(a.folder))


async def test_an_update_is_not_visible_before_its_commit(engine: Served, a: Model, b: Model) -> None:
    await engine.client.begin_update()
    await engine.client.update_from_disk(str(b.folder), "7")
    staged = await engine.client.checksums()
    assert staged.staged
    assert staged.digest == digest(specs(b.folder))
    assert await engine.greedy(PROMPTS[0]) == tiny.greedy(a.reference, PROMPTS[0], 8)
    assert await engine.version() == "1"
    await engine.client.end_update()
    assert await engine.greedy(PROMPTS[0]) == tiny.greedy(b.reference, PROMPTS[0], 8)
    assert await engine.version() == "7"
    assert (await engine.client.checksums()).digest == digest(specs(b.folder))


async def test_a_dropped_update_leaves_no_trace(engine: Served, a: Model, b: Model) -> None:
    await engine.client.begin_update()
    await engine.client.update_from_disk(str(b.folder), "7")
    await engine.client.end_update(commit=False)
    assert (await engine.client.checksums()).digest == digest(specs(a.folder))
    assert await engine.version() == "1"


async def test_what_does_not_fit_is_refused_and_nothing_changes(
    engine: Served, a: Model, b: Model, tmp_path: Path
) -> None:
    """Bare SGLang answers success for a name that it does not know."""
    with pytest.raises(EngineError, match="no weight update is open"):
        await engine.client.end_update()
    await engine.client.begin_update()
    with pytest.raises(EngineError, match="is open already"):
        await engine.client.begin_update()
    for tensors, said in (
        ({"model.nope.weight": torch.zeros(2)}, "model.nope.weight: the model has no such parameter"),
        ({"model.norm.weight": torch.zeros(3)}, r"model.norm.weight: shape \[3\], the model has \[64\]"),
    ):
        encoded = base64.b64encode(safetensors.torch.save(tensors)).decode()
        with pytest.raises(EngineError, match=said):
            await engine.client.update_from_tensor([encoded])
    some = load_file(b.folder / "model.safetensors")
    some.pop("model.layers.1.mlp.up_proj.weight")
    safetensors.torch.save_file(some, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"model.layers.1.mlp.up_proj.weight: missing"):
        await engine.client.update_from_disk(str(tmp_path))
    with pytest.raises(EngineError, match="group_name: 'nobody' is not joined"):
        await engine.client.update_from_distributed(specs(b.folder), "nobody")
    await engine.client.end_update(commit=False)
    assert (await engine.client.checksums()).digest == digest(specs(a.folder))


async def test_a_part_of_the_model_may_be_sent_over_http(engine: Served, a: Model, b: Model) -> None:
    new = load_file(b.folder / "model.safetensors")
    names = [name for name in sorted(new) if ".0." in name]
    await engine.client.begin_update()
    encoded = base64.b64encode(safetensors.torch.save({name: new[name] for name in names})).decode()
    await engine.client.update_from_tensor([encoded], "2")
    assert (await engine.client.checksums()).tensors == {name: tensor_checksum(new[name]) for name in names}
    await engine.client.end_update()
    expected = {spec.name: spec.sha256 for spec in specs(a.folder)} | {n: tensor_checksum(new[n]) for n in names}
    assert (await engine.client.checksums()).tensors == expected


@pytest.mark.parametrize("paused", [False, True])
async def test_retract_recomputes_running_samples(engine: Served, a: Model, b: Model, paused: bool) -> None:
    task = await engine.running(PROMPTS[:3])
    if paused:
        await engine.client.pause("retract")
    await engine.client.update_from_disk(str(b.folder), "2", mode="retract")
    if paused:
        await engine.client.resume()
    for prompt, answer in zip(PROMPTS, await engine.cut_off(task, 3), strict=False):
        check_spans(prompt, answer, {"1": a, "2": b})
        assert answer["meta_info"]["weight_version"] == "2"
        assert answer["meta_info"]["num_retractions"] == 1


async def test_no_cache_of_old_weights_serves_new_ones(engine: Served, a: Model, b: Model) -> None:
    prompt = PROMPTS[3]
    assert await engine.greedy(prompt) == tiny.greedy(a.reference, prompt, 8)
    await engine.client.update_from_disk(str(b.folder), "2")
    (answer,) = await engine.sample(prompt, temperature=0, max_new_tokens=8)
    assert answer["output_ids"] == tiny.greedy(b.reference, prompt, 8)
    assert answer["meta_info"]["cached_tokens"] == 0
    check_spans(prompt, answer, {"2": b})


async def test_a_relabelled_version_starts_a_span(engine: Served) -> None:
    task = await engine.running(PROMPTS[:2])
    await engine.client.set_version("5")
    for answer in await engine.cut_off(task, 2):
        assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["1", "5"]


@pytest.fixture
def publisher(a: Model, b: Model) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.rollout.publisher", str(a.folder), str(b.folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


async def test_a_broadcast_is_received_while_samples_go_on(
    engine: Served, a: Model, b: Model, publisher: subprocess.Popen[str]
) -> None:
    """Buckets, then tensor by tensor; then the publisher dies in the middle."""
    assert publisher.stdout is not None
    assert publisher.stdin is not None
    client = engine.client
    port = int(await asyncio.to_thread(publisher.stdout.readline))
    task = await engine.running([PROMPTS[0]])
    await client.init_group("127.0.0.1", port, 1, 2, GROUP, "gloo", TIMEOUT_S)
    wanted = {spec.name: spec for spec in specs(b.folder)}
    await client.begin_update()
    with pytest.raises(EngineError, match="model.nothing: the model has no such parameter"):
        await client.update_from_distributed([TensorSpec("model.nothing", "float32", (1,), "0" * 64)], GROUP)
    for names in halves(wanted):
        await client.update_from_distributed([wanted[name] for name in names], GROUP, weight_version="2")
    assert (await client.checksums()).digest == digest(specs(b.folder))
    assert not task.done()
    await client.end_update(mode="retract")
    check_spans(PROMPTS[0], (await engine.cut_off(task, 1))[0], {"1": a, "2": b})

    await client.begin_update()
    await client.update_from_distributed(specs(a.folder), GROUP, bucket=False, weight_version="3")
    await client.end_update()
    assert (await client.checksums()).digest == digest(specs(a.folder))

    await client.begin_update()
    transfer = asyncio.create_task(client.update_from_distributed(specs(b.folder), GROUP, weight_version="4"))
    publisher.stdin.write("go\n")
    publisher.stdin.flush()
    with pytest.raises(EngineError, match="broadcast of"):
        await transfer
    assert not (await client.checksums()).staged
    await client.end_update(commit=False)
    await client.destroy_group(GROUP)
    assert await engine.version() == "3"
    assert await engine.greedy(PROMPTS[0]) == tiny.greedy(a.reference, PROMPTS[0], 8)


async def test_a_group_that_never_meets_is_given_up_in_time(engine: Served, a: Model) -> None:
    """Generation goes on meanwhile; bare SGLang would wait for its whole default deadline, and generate nothing."""
    joining = asyncio.create_task(engine.client.init_group("127.0.0.1", 1, 1, 2, "nobody", "gloo", 2.0))
    assert await engine.greedy(PROMPTS[0]) == tiny.greedy(a.reference, PROMPTS[0], 8)
    with pytest.raises(EngineError, match="could not join"):
        await joining


@dataclass
class Sender:
    """Rank 0 of a group of its own, which the engine is in."""

    group: str
    process: asyncio.subprocess.Process

    def send(self, bucket: list[TensorSpec]) -> None:
        """As soon as the engine takes it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([spec.name for spec in bucket]).encode() + b"\n")

    async def taken(self) -> None:
        """By the engine: one bucket more."""
        assert self.process.stdout is not None
        assert await self.process.stdout.readline() == b"sent\n"

    async def die(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@pytest_asyncio.fixture(loop_scope="session")
async def senders(engine: Served, b: Model) -> AsyncIterator[list[Sender]]:
    """Two, which send out of model B."""
    started: list[Sender] = []
    try:
        for group in ("first", "second"):
            command = [sys.executable, "-m", "tests.rollout.sender", str(b.folder), group]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            started.append(Sender(group, await asyncio.create_subprocess_exec(*command, **pipes)))
        for sender in started:
            assert sender.process.stdout is not None
            port = int(await sender.process.stdout.readline())
            await engine.client.init_group("127.0.0.1", port, 1, 2, sender.group, "gloo", TIMEOUT_S)
        yield started
    finally:
        for sender in started:
            await sender.die()
    with suppress(EngineError):  # none is open
        await engine.client.end_update(commit=False)
    for sender in started:
        await engine.client.destroy_group(sender.group)


def thirds(folder: Path) -> list[list[TensorSpec]]:
    listed = specs(folder)
    return [listed[start::3] for start in range(3)]


Transfer = list[tuple[str, list[TensorSpec]]]


async def test_a_transfer_is_one_call_for_buckets_of_several_senders(
    engine: Served, a: Model, b: Model, senders: list[Sender]
) -> None:
    task = await engine.running([PROMPTS[0]])
    buckets = thirds(b.folder)
    transfer: Transfer = []
    for bucket, sender in zip(buckets, (senders[0], senders[1], senders[0]), strict=True):
        sender.send(bucket)
        transfer.append((sender.group, bucket))
    await engine.client.begin_update()
    await engine.client.update_from_buckets(transfer)
    assert (await engine.client.checksums()).digest == digest(specs(b.folder))
    assert not task.done()
    assert await engine.version() == "1"
    await engine.client.end_update(weight_version="2", mode="retract")
    check_spans(PROMPTS[0], (await engine.cut_off(task, 1))[0], {"1": a, "2": b})


async def test_a_bucket_that_does_not_fit_is_refused_before_anything_is_received(
    engine: Served, a: Model, b: Model, senders: list[Sender]
) -> None:
    first, second, third = thirds(b.folder)
    one, other = (sender.group for sender in senders)
    shorter = [replace(second[0], shape=(3,)), *second[1:]]
    wrong: list[tuple[Transfer, str]] = [
        ([(one, first), (other, shorter), (one, third)], f"{second[0].name}: shape"),
        ([(one, first), ("nobody", second), (one, third)], "group_name: 'nobody' is not joined"),
        ([(one, first), (other, []), (one, third)], "is not .group_name, number_of_tensors."),
    ]
    senders[0].send(first)
    await engine.client.begin_update()
    for transfer, said in wrong:
        with pytest.raises(EngineError, match=said):
            await engine.client.update_from_buckets(transfer)
        assert not (await engine.client.checksums()).staged
    senders[1].send(second)
    await engine.client.update_from_buckets([(one, first), (other, second)])
    await engine.client.end_update(weight_version="2")
    live = {spec.name: spec.sha256 for spec in specs(a.folder)} | {s.name: s.sha256 for s in (*first, *second)}
    assert (await engine.client.checksums()).tensors == live


@pytest.mark.parametrize("client_goes", [False, True])
async def test_a_sender_that_dies_in_the_middle_leaves_what_is_live(
    engine: Served, a: Model, b: Model, senders: list[Sender], client_goes: bool
) -> None:
    first, second, third = thirds(b.folder)
    one, other = senders
    await engine.client.begin_update()
    one.send(first)
    one.send(third)
    transfer = asyncio.create_task(
        engine.client.update_from_buckets([(one.group, first), (other.group, second), (one.group, third)])
    )
    await one.taken()
    if client_goes:
        transfer.cancel()
        await asyncio.gather(transfer, return_exceptions=True)
    await other.die()
    if not client_goes:
        with pytest.raises(EngineError, match="bucket 2 of 3: broadcast of"):
            await transfer
    await engine.client.end_update(commit=False)
    assert not (await engine.client.checksums()).staged
    assert (await engine.client.checksums()).digest == digest(specs(a.folder))
    assert await engine.greedy(PROMPTS[0]) == tiny.greedy(a.reference, PROMPTS[0], 8)
    assert await engine.version() == "1"
