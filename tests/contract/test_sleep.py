"""Sleep and wake: memory given back and taken again, and weights taken from memory that the trainer shares."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.dcs.digest import TensorSpec, digest
from services.dcs.handles import Handle
from services.dcs.segments import Segment
from services.rollout.engines.client import EngineError
from tests.contract.conftest import Model, Served
from tests.contract.test_updates import check_spans, specs
from tests.rollout import tiny
from tests.rollout.tiny import PROMPTS

pytestmark = pytest.mark.asyncio(loop_scope="session")
HANDLE = Handle("00000000-0000-0000-0000-000000000001", b"\0" * 64, 0, 1 << 30, "/torch_1_1", 0)
"""Of a GPU that no machine has."""


@contextmanager
def shared(folder: Path, flip: int | None = None) -> Iterator[tuple[Segment, list[TensorSpec]]]:
    """The weights of a folder as a trainer offers them, perhaps with a flipped bit."""
    listed = specs(folder)
    tensors = load_file(folder / "model.safetensors")
    data = b"".join(bytes(tensors[spec.name].reshape(-1).view(torch.uint8).numpy()) for spec in listed)
    segment = Segment(f"slipstream-test-{uuid.uuid4().hex}", len(data))
    try:
        segment.reserve(0, len(data))
        segment.memory[:] = data
        if flip is not None:
            segment.memory[flip] ^= 1
        yield segment, listed
    finally:
        segment.close()


async def test_an_engine_sleeps_and_wakes_on_new_weights(engine: Served, a: Model, b: Model) -> None:
    """The whole handshake, twice: what was asked for meanwhile is answered under the weights that it wakes on."""
    client = engine.client
    for version, model in (("2", b), ("3", a)):
        await client.pause("retract")
        await client.release_memory()
        asked = asyncio.create_task(engine.sample(PROMPTS[0], temperature=0, max_new_tokens=8))
        await asyncio.sleep(0.2)
        assert not asked.done()
        await client.resume_memory(["weights"])
        with shared(model.folder) as (segment, listed):
            await client.begin_update()
            await client.update_from_shared(listed, segment.name, version)
        assert (await client.checksums()).digest == digest(specs(model.folder))
        await client.end_update()
        await client.resume_memory(["kv_cache", "cuda_graph"])
        await client.resume()
        (answer,) = await asked
        assert answer["output_ids"] == tiny.greedy(model.reference, PROMPTS[0], 8)
        check_spans(PROMPTS[0], answer, {version: model})
        assert await engine.version() == version


async def test_weights_are_taken_from_shared_memory_while_samples_go_on(engine: Served, a: Model, b: Model) -> None:
    task = await engine.running([PROMPTS[0]])
    await engine.client.begin_update()
    with shared(b.folder) as (segment, listed):
        await engine.client.update_from_shared(listed, segment.name, "2")
    assert (await engine.client.checksums()).digest == digest(listed)
    await engine.client.end_update(mode="retract")
    (answer,) = await engine.cut_off(task, 1)
    check_spans(PROMPTS[0], answer, {"1": a, "2": b})


async def test_what_was_changed_on_the_way_has_another_digest(engine: Served, a: Model, b: Model) -> None:
    await engine.client.begin_update()
    with shared(b.folder, flip=4321) as (segment, listed):
        await engine.client.update_from_shared(listed, segment.name, "2")
    assert (await engine.client.checksums()).digest != digest(listed)
    await engine.client.end_update(commit=False)
    assert (await engine.client.checksums()).digest == digest(specs(a.folder))


async def test_a_segment_that_is_not_there_is_refused(engine: Served, a: Model, b: Model) -> None:
    listed = specs(b.folder)
    with pytest.raises(EngineError, match="no weight update is open"):
        await engine.client.update_from_shared(listed, "slipstream-nothing")
    await engine.client.begin_update()
    for name, said in (
        ("slipstream-nothing", "its trainer is gone"),
        ("../../etc/passwd", "not a name of ours"),
        (HANDLE.fields(), f"GPU {HANDLE.device} is not visible"),
        (HANDLE.fields() | {"size": -1}, "device handle: size: -1"),
        ({}, "device handle: expected the fields"),
        (7, "segment: 7 has the wrong type"),
    ):
        with pytest.raises(EngineError, match=said):
            await engine.client.update_from_shared(listed, name)  # type: ignore[arg-type]
    with shared(b.folder) as (segment, _), pytest.raises(EngineError, match="bytes, .* were announced"):
        await engine.client.update_from_shared([*listed, *listed], segment.name)
    await engine.client.end_update(commit=False)
    assert (await engine.client.checksums()).digest == digest(specs(a.folder))


async def test_an_engine_at_work_does_not_sleep(engine: Served) -> None:
    if engine.kind == "sglang":
        pytest.skip("SGLang's scheduler dies of this; a replica pauses it first")
    task = await engine.running([PROMPTS[0]])
    with pytest.raises(EngineError, match="requests are running"):
        await engine.client.release_memory()
    await engine.cut_off(task, 1)


async def test_the_light_engine_gives_its_memory_back(engine: Served, a: Model) -> None:
    """SGLang does so on a GPU only (docs/colocate.md)."""
    if engine.kind == "sglang":
        pytest.skip("on a CPU SGLang has no memory saver: it keeps its memory, and only its cache is flushed")
    client = engine.client
    await engine.sample(PROMPTS[:3], max_new_tokens=64)
    await client.release_memory()
    with pytest.raises(EngineError, match="the weights were released"):
        await client.checksums()
    await client.begin_update()
    with shared(a.folder) as (segment, listed):
        await client.update_from_shared(listed[1:], segment.name)
    with pytest.raises(EngineError, match=rf"an update has to bring all of them; 1 are missing, {listed[0].name}"):
        await client.end_update()
    await client.resume_memory()
    await client.update_from_disk(str(a.folder), "1")
    assert await engine.greedy(PROMPTS[0]) == tiny.greedy(a.reference, PROMPTS[0], 8)
