"""Whole runs with two real SGLang servers as their replicas. `make test-sglang`; it takes minutes, most of them SGLang's start.

The first test listens to what a run tells everybody: it keeps the weights of each version and every trajectory. Afterwards the
trainer's own policy computes the log-probability of each token under the weights of the version that the token names. All must
agree; with the weights of the version next to it they must not, or the comparison would show nothing.
The second is a run on one device: servers and trainer take turns, and every version comes through shared memory.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest

from services.controller.attach import Run
from services.dcs import snapshots
from services.dcs.client import DcsClient
from services.rollout.engines.sglang.command import ENVIRONMENT
from services.trainer.batches import TrainSample, pack
from services.trainer.megatron.policy import Policy
from shared import wire
from shared.records import Announcement, Group
from shared.sections import TrainerConfig
from tests.e2e.test_run import GROUPS, Example, until_trained
from tests.processes import children, words
from tests.shared.runs import beside, until

pytestmark = pytest.mark.sglang
STEPS, COLOCATED_STEPS = 16, 8
OPTIONS = ("rollout.engine=sglang", "rollout.sglang.max_total_tokens=16384", "rollout.sglang.context_length=128")
TOLERANCE = 1e-4
BATCH_TOKENS = 8192
DEADLINE_S = 900.0


@pytest.fixture
async def example(tmp_path: Path) -> AsyncIterator[Example]:
    assert ENVIRONMENT.exists(), f"{ENVIRONMENT} is missing: make install-sglang"
    example = Example(tmp_path)
    yield example
    await example.close()


class Witness:
    """Keeps the weights of every version and every trajectory of a run."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self.folder = run, folder
        self.weights: dict[int, Path] = {}
        self.groups: list[Group] = []

    def listening(self) -> AbstractAsyncContextManager[None]:
        return beside(self._weights(), self._trajectories())

    async def _weights(self) -> None:
        async with DcsClient(self.run.kv) as dcs:
            stream = self.run.queue.read("weights", subject=self.run.subjects.announced, live=True)
            async for data, _ in stream:
                version = wire.decode(data, Announcement).version
                pulled, _ = await snapshots.pull(dcs, version, self.folder / str(version))
                self.weights[version] = pulled

    async def _trajectories(self) -> None:
        async for data, _ in self.run.queue.read("trajectories", live=True):
            self.groups.append(wire.decode(data, Group))


async def test_a_run_with_sglang_learns_and_its_logprobs_are_the_trainers(example: Example, tmp_path: Path) -> None:
    up = await example.up(f"steps={STEPS}", "dcs.keep_snapshots=100", "trainer.warm_start.steps=150", *OPTIONS)
    async with example.attached() as run:
        witness = Witness(run, tmp_path / "witness")
        async with witness.listening():
            async with asyncio.timeout(DEADLINE_S):
                await until_trained(run, 4 * GROUPS)
            await kill_scheduler(run)
            await until(lambda: up.returncode is not None, "the run ends", DEADLINE_S)
    output = (example.folder / "output.txt").read_text()
    assert up.returncode == 0, output[-4000:]
    report = json.loads(example.report.read_text())
    assert report["balanced"], report["faults"]
    assert report["trained"] == STEPS * GROUPS
    assert report["staleness_max"] <= 1
    assert report["reward_last"] > report["reward_first"] + 0.1
    compare(witness, example.folder / "model")
    assert "engine_died" in output


async def test_a_run_on_one_device_with_sglang(example: Example) -> None:
    sets = (f"steps={COLOCATED_STEPS}", "placement=colocate", "max_staleness=0", "trainer.warm_start.steps=40")
    up = await example.up(*sets, *OPTIONS)
    async with asyncio.timeout(DEADLINE_S):
        assert await up.wait() == 0, example.text
    report = json.loads(example.report.read_text())
    assert report["faults"] == []
    assert report["balanced"]
    assert report["issued"] == report["trained"] == COLOCATED_STEPS * GROUPS
    assert set(report["staleness_histogram"]) == {"0"}
    later = [version["holders"] for version in report["versions"] if version["step"] > 0]
    assert [sorted(holders) for holders in later] == [["rollout-0", "rollout-1"]] * COLOCATED_STEPS
    assert {holder["how"] for holders in later for holder in holders.values()} == {"shared"}
    assert report["turns"]["trainer"]["sleeps"] == COLOCATED_STEPS + 1
    assert report["turns"]["trainer"]["wakes"] == COLOCATED_STEPS
    assert report["turns"]["rollout"]["sleeps"] == report["turns"]["rollout"]["wakes"] == 2 * COLOCATED_STEPS


async def kill_scheduler(run: Run) -> None:
    """SGLang's own child of a replica at work: its server and its replica have to notice, and to start another."""
    rollouts = [beat for beat in await run.registry.alive() if beat.replica.startswith("rollout-")]
    serving = max(rollouts, key=lambda beat: beat.progress)
    inside = children(serving.pid, recursive=True)
    schedulers = [child for child in inside if "sglang::scheduler" in " ".join(words(child))]
    assert schedulers, [words(child) for child in inside]
    schedulers[0].kill()


def compare(witness: Witness, model: Path) -> None:
    """Every token against the weights of its version, and of another version."""
    parts = by_version(witness.groups)
    tokens = sum(len(group.samples.ids) for group in witness.groups if group.samples is not None)
    assert sum(end - start for spans in parts.values() for _, start, end, _ in spans) == tokens > 1000
    assert len(parts) >= STEPS // 2
    policy = Policy.create(model, TrainerConfig(device="cpu", micro_batch_tokens=BATCH_TOKENS), dtype="float32", seed=0)
    worst: dict[int, float] = {}
    mixed: dict[int, float] = {}
    for version, spans in parts.items():
        worst[version] = largest_difference(policy, witness.weights[version], spans)
        other = version + 1 if version + 1 in witness.weights else version - 1
        mixed[version] = largest_difference(policy, witness.weights[other], spans)
    print(f"largest differences: {max(worst.values()):.2e}; with versions mixed up at least {min(mixed.values()):.2e}")
    assert max(worst.values()) <= TOLERANCE, worst
    assert min(mixed.values()) > TOLERANCE, mixed


Span = tuple[TrainSample, int, int, np.ndarray]


def by_version(groups: list[Group]) -> dict[int, list[Span]]:
    """(sample, start, end, log-probabilities) of each span, by the version that drew it; greedy samples' are at temperature 1."""
    found: dict[int, list[Span]] = defaultdict(list)
    for group in groups:
        assert group.samples is not None
        assert group.prompt_ids is not None
        prompt = group.prompt_ids
        for one in group.samples.split():
            mask = np.ones(len(one.ids), dtype=np.uint8)
            ids = np.concatenate([prompt, one.ids])
            sample = TrainSample(group.id, ids, len(prompt), mask, one.logprobs, 0.0)
            for start, end, version in zip(one.span_start, one.span_end, one.span_version, strict=True):
                found[int(version)].append((sample, int(start), int(end), one.logprobs))
    return found


def largest_difference(policy: Policy, weights: Path, spans: list[Span]) -> float:
    policy.load_hf(weights)
    largest = 0.0
    for sample, start, end, logprobs in spans:
        (batch,) = pack([sample], BATCH_TOKENS)
        found = policy.logprobs(batch)[0].numpy()
        largest = max(largest, float(np.abs(found[start:end] - logprobs[start:end]).max()))
    return largest
