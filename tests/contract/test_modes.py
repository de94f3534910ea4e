"""What happens to running requests at a switch: `rollout.on_new_weights`, as a replica does it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch

from services.dcs.digest import digest
from services.rollout.draw import Drawer
from services.rollout.engine_weights import EngineWeights
from services.rollout.engines.client import EngineError
from services.rollout.episodes import continuation, generate_request
from shared.records import Group, Sampling
from tests.contract.conftest import KINDS, TOLERANCE, Model, Served, serve
from tests.contract.test_updates import check_spans, specs
from tests.rollout import tiny
from tests.rollout.publisher import GROUP, TIMEOUT_S, halves
from tests.rollout.scripted import Tokens
from tests.rollout.tiny import PROMPTS, logprobs_of, reference_logprobs
from tests.shared.runs import make_config

pytestmark = pytest.mark.asyncio(loop_scope="session")


def without_stops(*arguments: Any) -> dict[str, Any]:
    """A replica's own request, for samples that last."""
    request = generate_request(*arguments)
    return request | {"sampling_params": request["sampling_params"] | {"ignore_eos": True}}


async def test_abort_ends_samples_and_they_continue_from_their_tokens(
    engine: Served, a: Model, b: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token keeps the version that drew it, over three requests, of which only the last ends by itself."""
    switched = False

    def going_on(*arguments: Any) -> dict[str, Any]:
        request = continuation(*arguments)
        return request | {"sampling_params": request["sampling_params"] | ({"max_new_tokens": 8} if switched else {})}

    monkeypatch.setattr("services.rollout.draw.generate_request", without_stops)
    monkeypatch.setattr("services.rollout.draw.continuation", going_on)
    weights = await EngineWeights.attach(engine.client, "abort", 1, specs(a.folder))
    config = make_config("r", rollout={"on_new_weights": "abort", "keep_after_s": 1000, "engine": engine.kind})
    ctx: Any = SimpleNamespace(config=config, replica="r0")
    drawer = Drawer(ctx, engine.client, Tokens(), lambda version: version - 1)  # type: ignore[arg-type]
    group = Group("0-1", "train", 1, 1, 0, "p", None, {}, Sampling(n=3, max_new_tokens=engine.forever))
    drawing = asyncio.create_task(drawer.draw(group, PROMPTS[0], SimpleNamespace(delivered=1)))  # type: ignore[arg-type]
    engine.started.append(drawing)
    await engine.some_more(3)
    await weights.load(b.folder, 2, specs(b.folder), {})
    await engine.some_more(3)
    assert drawer.counts.interrupted >= 3
    switched = True
    await engine.client.abort(everything=True)
    samples = await drawing
    assert samples.finish == ["length"] * 3
    for one in samples.split():
        tokens = one.ids.tolist()
        spans = {"1": one.span_version == 1, "2": one.span_version == 2}
        for version, model in (("1", a), ("2", b)):
            assert spans[version].any()
            expected = reference_logprobs(model.reference, PROMPTS[0] + tokens)[len(PROMPTS[0]) - 1 :]
            for start, end in zip(one.span_start[spans[version]], one.span_end[spans[version]], strict=True):
                got = torch.from_numpy(one.logprobs[start:end].copy())
                torch.testing.assert_close(got, expected[start:end], atol=2 * TOLERANCE, rtol=0)


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=KINDS)
async def keeping(request: pytest.FixtureRequest, a: Model) -> AsyncIterator[Served]:
    """A server of its own that keeps caches in place: SGLang has to be started for that."""
    options = {"in_place": True} if request.param == "sglang" else {}
    async for served in serve(request.param, a.folder, **options):
        yield served


async def test_in_place_keeps_the_cache_and_names_the_spans(keeping: Served, a: Model, b: Model) -> None:
    task = await keeping.running(PROMPTS[:3])
    await keeping.client.update_from_disk(str(b.folder), "2", mode="in_place")
    answers = await keeping.cut_off(task, 3)
    for prompt, answer in zip(PROMPTS, answers, strict=False):
        meta = answer["meta_info"]
        first, second = meta["weight_versions"]
        assert (first["version"], second["version"], meta["num_retractions"]) == ("1", "2", 0)
        expected = reference_logprobs(a.reference, prompt + answer["output_ids"])[len(prompt) - 1 :]
        cut = slice(0, first["end"])
        torch.testing.assert_close(logprobs_of(answer)[cut], expected[cut], atol=TOLERANCE, rtol=0)
        recomputed = reference_logprobs(b.reference, prompt + answer["output_ids"])[len(prompt) - 1 :]
        assert (logprobs_of(answer) - recomputed)[second["start"] :].abs().max() > 1e-3  # the old keys are still there
    (fresh,) = await keeping.sample(PROMPTS[0], max_new_tokens=20)
    check_spans(PROMPTS[0], fresh, {"2": b})


@pytest.mark.sglang
async def test_all_ranks_of_an_engine_receive_and_show_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensor-parallel ranks, each a member of the broadcast group."""
    shape = {"intermediate_size": 128}  # SGLang pads others for two ranks on a CPU
    a, b = (Model(tmp_path / str(s), tiny.build(tmp_path / str(s), seed=s, **shape)) for s in (1, 2))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    command = [sys.executable, "-m", "tests.rollout.publisher", str(a.folder), str(b.folder), "2"]
    async for engine in serve("sglang", a.folder, tp_size=2):
        weights = await EngineWeights.attach(engine.client, "retract", 1, specs(a.folder))
        assert (weights.ranks, weights.stages, weights.verifiable) == (2, True, True)
        assert (await engine.client.checksums()).digest == digest(specs(a.folder))
        publisher = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert publisher.stdout is not None
            port = int(await publisher.stdout.readline())
            await engine.client.init_group("127.0.0.1", port, 1, 3, GROUP, "gloo", TIMEOUT_S)
            wanted = {spec.name: spec for spec in specs(b.folder)}
            await engine.client.begin_update()
            for names in halves(wanted):
                await engine.client.update_from_distributed([wanted[name] for name in names], GROUP)
            await engine.client.end_update(weight_version="2", mode="retract")
            assert (await engine.client.checksums()).digest == digest(specs(b.folder))
            assert await engine.greedy(PROMPTS[0]) == tiny.greedy(b.reference, PROMPTS[0], 8)
        finally:
            with suppress(ProcessLookupError):
                publisher.kill()
            await publisher.wait()


@pytest.mark.sglang
async def test_without_hooks_a_version_comes_as_a_verified_folder(a: Model, b: Model) -> None:
    """SGLang as it is: paused while it loads, and what runs goes on under the new weights."""
    async for engine in serve("sglang", a.folder, hooks=False):
        weights = await EngineWeights.attach(engine.client, "retract", 1, specs(a.folder))
        assert (weights.stages, weights.verifiable) == (False, False)
        task = await engine.running([PROMPTS[0]])
        await weights.load(b.folder, 2, specs(b.folder), {})
        check_spans(PROMPTS[0], (await engine.cut_off(task, 1))[0], {"1": a, "2": b})
        assert await engine.version() == "2"
        assert await engine.client.ready()
        assert await engine.greedy(PROMPTS[0]) == tiny.greedy(b.reference, PROMPTS[0], 8)


async def test_in_place_is_refused_where_prefixes_are_shared(engine: Served, b: Model) -> None:
    """The light engine shares none."""
    task = await engine.running([PROMPTS[0]])
    if engine.kind == "sglang":
        with pytest.raises(EngineError, match="in_place needs --disable-radix-cache"):
            await engine.client.update_from_disk(str(b.folder), "2", mode="in_place")
        versions = ["1"]
    else:
        await engine.client.update_from_disk(str(b.folder), "2", mode="in_place")
        versions = ["1", "2"]
    (answer,) = await engine.cut_off(task, 1)
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == versions
