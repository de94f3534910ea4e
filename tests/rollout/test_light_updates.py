"""Weight updates: staged, verified, switched between two steps; every token's log-probability is that of its span's weights."""

from __future__ import annotations

import asyncio
import base64
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

from services.dcs.digest import TensorSpec, digest, dtype_name, tensor_checksum
from services.rollout.engines.client import EngineError
from tests.rollout import tiny
from tests.rollout.publisher import GROUP, TIMEOUT_S, halves
from tests.rollout.tiny import FOREVER, PROMPTS, logprobs_of, reference_logprobs, until


def specs(folder: Any) -> list[TensorSpec]:
    tensors = load_file(folder / "model.safetensors")
    return [
        TensorSpec(name, dtype_name(tensor), tuple(tensor.shape), tensor_checksum(tensor))
        for name, tensor in sorted(tensors.items())
    ]


async def greedy(light: Any) -> list[int]:
    (answer,) = await light.sample(PROMPTS[0], temperature=0, max_new_tokens=8)
    return answer["output_ids"]


async def running(light: Any, length: int = FOREVER, **settings: Any) -> asyncio.Task[Any]:
    """Samples that are in the middle of decoding."""
    task = asyncio.create_task(light.sample(PROMPTS[:3], max_new_tokens=length, **settings))
    await some_more(light)
    return task


async def some_more(light: Any) -> None:
    before = light.generated()
    await until(lambda: light.generated() > before + 30)


async def cut_off(light: Any, task: asyncio.Task[Any]) -> list[dict[str, Any]]:
    """What running samples have a little later."""
    await some_more(light)
    await light.client.abort(everything=True)
    answers = await task
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
    return answers


async def test_a_staged_update_is_not_visible_before_its_commit(light, model, other) -> None:
    old, new = (tiny.greedy(m.reference, PROMPTS[0], 8) for m in (model, other))
    live = await light.client.checksums()
    assert not live.staged
    assert live.tensors == {spec.name: spec.sha256 for spec in specs(model.folder)}
    assert live.digest == digest(specs(model.folder))
    await light.client.begin_update()
    await light.client.update_from_disk(str(other.folder), "7")
    staged = await light.client.checksums()
    assert staged.staged
    assert staged.digest == digest(specs(other.folder))
    assert await greedy(light) == old
    assert (await light.client.model_info())["weight_version"] == "default"
    await light.client.end_update()
    assert await greedy(light) == new
    assert (await light.client.model_info())["weight_version"] == "7"
    assert (await light.client.checksums()).digest == digest(specs(other.folder))


async def test_a_dropped_update_leaves_the_live_weights(light, model, other) -> None:
    await light.client.begin_update()
    await light.client.update_from_disk(str(other.folder), "7")
    await light.client.end_update(commit=False)
    assert (await light.client.checksums()).digest == digest(specs(model.folder))
    assert (await light.client.model_info())["weight_version"] == "default"


@pytest.mark.parametrize("paused", [False, True])
async def test_retract_recomputes_running_samples_under_the_new_weights(light, model, other, paused: bool) -> None:
    task = await running(light)
    if paused:
        await light.client.pause("retract")
        assert (await light.client.load())["num_running_reqs"] == 0
        await light.client.flush_cache()
    await light.client.update_from_disk(str(other.folder), "1")
    if paused:
        await light.client.resume()
    for prompt, answer in zip(PROMPTS, await cut_off(light, task), strict=False):
        meta = answer["meta_info"]
        first, second = meta["weight_versions"]
        assert (first["version"], second["version"], meta["weight_version"]) == ("default", "1", "1")
        assert (first["start"], first["end"], second["end"]) == (0, second["start"], len(answer["output_ids"]))
        assert meta["num_retractions"] == 1
        for span, reference in ((first, model.reference), (second, other.reference)):
            expected = reference_logprobs(reference, prompt + answer["output_ids"])[len(prompt) - 1 :]
            cut = slice(span["start"], span["end"])
            torch.testing.assert_close(logprobs_of(answer)[cut], expected[cut], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("paused", [False, True])
async def test_in_place_keeps_the_cache_and_still_names_the_spans(light, model, other, paused: bool) -> None:
    task = await running(light)
    if paused:
        await light.client.pause("in_place")
        with pytest.raises(EngineError, match="3 requests are running"):
            await light.client.flush_cache()
        frozen = light.generated()
        await light.client.begin_update()
        await light.client.update_from_disk(str(other.folder), "1")
        await light.client.end_update()  # what is frozen in place is kept in place
        assert light.generated() == frozen
        await light.client.resume()
    else:
        await light.client.update_from_disk(str(other.folder), "1", mode="in_place")
    for prompt, answer in zip(PROMPTS, await cut_off(light, task), strict=False):
        meta = answer["meta_info"]
        first, second = meta["weight_versions"]
        assert (first["version"], second["version"], meta["num_retractions"]) == ("default", "1", 0)
        expected = reference_logprobs(model.reference, prompt + answer["output_ids"])[len(prompt) - 1 :]
        torch.testing.assert_close(logprobs_of(answer)[: first["end"]], expected[: first["end"]], atol=2e-4, rtol=1e-4)
        recomputed = reference_logprobs(other.reference, prompt + answer["output_ids"])[len(prompt) - 1 :]
        difference = (logprobs_of(answer) - recomputed)[second["start"] :]
        assert difference.abs().max() > 1e-3  # the old keys and values are still there


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_seeded_samples_survive_a_pause_unchanged_to_their_end(light, mode: str) -> None:
    settings = {"sampling_seed": 3}
    undisturbed = await light.sample(PROMPTS[:3], max_new_tokens=600, **settings)
    task = await running(light, 600, **settings)
    await light.client.pause(mode)
    await light.client.resume()
    disturbed = await task
    assert [a["output_ids"] for a in disturbed] == [a["output_ids"] for a in undisturbed]


async def test_a_relabelled_version_starts_a_span_and_aborts_only_if_asked(light) -> None:
    task = await running(light)
    await light.client.set_version("5")
    await some_more(light)
    assert not task.done()
    for answer in await cut_off(light, task):
        assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["default", "5"]
    task = await running(light)
    await light.client.set_version("6", abort_all=True)
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in await task} == {"abort"}


async def test_tensors_over_http_may_be_a_part_of_the_model_but_no_pickle(light, model, other) -> None:
    tensors = load_file(other.folder / "model.safetensors")
    some = {name: tensors[name] for name in list(tensors)[:3]}
    encoded = base64.b64encode(safetensors.torch.save(some)).decode()
    await light.client.begin_update()
    await light.client.update_from_tensor([encoded], "2")
    assert (await light.client.checksums()).tensors == {name: tensor_checksum(tensor) for name, tensor in some.items()}
    pickled = base64.b64encode(pickle.dumps(list(some.items()))).decode()
    with pytest.raises(EngineError, match="takes no pickles"):
        await light.client.update_from_tensor([pickled])
    await light.client.end_update()
    live = (await light.client.checksums()).tensors
    expected = {spec.name: spec.sha256 for spec in specs(model.folder)}
    assert live == expected | {name: tensor_checksum(tensor) for name, tensor in some.items()}


async def test_calls_out_of_order_and_misfits_are_refused(light, tmp_path) -> None:
    spec = TensorSpec("model.norm.weight", "float32", (64,), "0" * 64)
    with pytest.raises(EngineError, match="no weight update is open"):
        await light.client.end_update()
    with pytest.raises(EngineError, match="no weight update is open"):
        await light.client.update_from_distributed([spec], GROUP)
    with pytest.raises(EngineError, match="no weight update is open"):
        await light.client.update_from_tensor([""])
    await light.client.begin_update()
    with pytest.raises(EngineError, match="open already"):
        await light.client.begin_update()
    with pytest.raises(EngineError, match="'weights' is not joined"):
        await light.client.update_from_distributed([spec], GROUP)
    with pytest.raises(EngineError, match="'weights' is not joined"):
        await light.client.destroy_group(GROUP)
    with pytest.raises(EngineError, match="config.json: cannot be read|neither model.safetensors"):
        await light.client.update_from_disk(str(tmp_path))
    tiny.build(tmp_path, seed=9, num_hidden_layers=1)
    with pytest.raises(EngineError, match=r"model\.layers\.1\.\S+: missing"):
        await light.client.update_from_disk(str(tmp_path))
    wrong = base64.b64encode(safetensors.torch.save({"model.norm.weight": torch.zeros(3)})).decode()
    with pytest.raises(EngineError, match=r"model.norm.weight: shape \[3\], the model has \[64\]"):
        await light.client.update_from_tensor([wrong])
    assert not (await light.client.checksums()).staged
    await light.client.end_update(commit=False)


@pytest.fixture
def publisher(model, other) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.rollout.publisher", str(model.folder), str(other.folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


async def test_distributed_updates_from_a_second_process(light, model, other, publisher) -> None:
    """Several buckets a version, then tensor by tensor, while samples go on; then a publisher that dies."""
    assert publisher.stdout is not None
    port = int(await asyncio.to_thread(publisher.stdout.readline))
    task = await running(light)
    await light.client.init_group("127.0.0.1", port, 1, 2, GROUP, "gloo", TIMEOUT_S)
    wanted = {spec.name: spec for spec in specs(other.folder)}

    await light.client.begin_update()
    with pytest.raises(EngineError, match=r"model\.nothing: the model has no such parameter"):
        await light.client.update_from_distributed([TensorSpec("model.nothing", "float32", (1,), "0" * 64)], GROUP)
    for names in halves(wanted):
        await light.client.update_from_distributed([wanted[name] for name in names], GROUP, weight_version="1")
    assert not task.done()
    assert (await light.client.checksums()).digest == digest(specs(other.folder))
    await light.client.end_update()
    assert {len(answer["meta_info"]["weight_versions"]) for answer in await cut_off(light, task)} == {2}
    assert await greedy(light) == tiny.greedy(other.reference, PROMPTS[0], 8)

    await light.client.begin_update()
    await light.client.update_from_distributed(specs(model.folder), GROUP, bucket=False, weight_version="2")
    await light.client.end_update()
    assert (await light.client.checksums()).digest == digest(specs(model.folder))

    await light.client.begin_update()
    transfer = asyncio.create_task(light.client.update_from_distributed(specs(other.folder), GROUP, weight_version="3"))
    assert publisher.stdin is not None
    publisher.stdin.write("go\n")
    publisher.stdin.flush()
    with pytest.raises(EngineError, match="broadcast of"):
        await transfer
    assert not (await light.client.checksums()).staged
    await light.client.end_update(commit=False)
    await light.client.destroy_group(GROUP)
    assert (await light.client.model_info())["weight_version"] == "2"
    assert await greedy(light) == tiny.greedy(model.reference, PROMPTS[0], 8)
