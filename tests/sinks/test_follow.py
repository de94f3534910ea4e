"""Sinks beside a run on a real broker: each message once, and to the end of the run."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.controller.attach import Run, attach
from services.sinks import follow
from services.sinks.endpoint import serve_metrics
from services.sinks.follow import Follower, Position, Told
from services.sinks.jsonl import JsonLines
from shared.broker import EmbeddedBroker
from shared.records import Event, Metric
from tests.shared.runs import make_config, until

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LAST_WORDS_S", 0.2)
    monkeypatch.setattr(follow, "STATE_S", 0.1)


@pytest.fixture
async def run(broker: EmbeddedBroker, run_name: str) -> AsyncIterator[Run]:
    async with attach(broker.url, run_name, create=True) as handle:
        await handle.queue.ensure_streams(make_config(run_name))
        await handle.set_state("running")
        yield handle


async def say(run: Run, *numbers: int) -> None:
    """A metric and an event of each number, stored."""
    for number in numbers:
        metric = Metric("trainer", "trainer-0", number, {"loss": float(number)}, time.time())
        await run.queue.publish(run.subjects.metrics("trainer", "trainer-0"), metric)
        event = Event("rollout", "rollout-0", "joined", str(number), {"number": number}, time.time())
        await run.queue.publish(run.subjects.events("rollout"), event)


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def test_a_file_has_everything_once_over_a_kill_in_mid_line(run: Run, tmp_path: Path):
    file = tmp_path / "out/metrics.jsonl"
    await say(run, 1, 2)
    first = JsonLines(file)
    following = asyncio.create_task(Follower(run, first, first.position).follow())
    await until(lambda: len(lines(file)) == 4, "the first lines", DEADLINE_S)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    with file.open("a") as half:
        half.write('{"stream": "metrics", "se')
    await say(run, 3)
    await run.set_state("finished")
    second = JsonLines(file)
    await asyncio.wait_for(Follower(run, second, second.position).follow(), DEADLINE_S)
    found = lines(file)
    assert sorted((line["stream"], line["seq"]) for line in found) == [
        (stream, seq) for stream in ("events", "metrics") for seq in (1, 2, 3)
    ]
    newest = max((line for line in found if line["stream"] == "metrics"), key=lambda line: line["seq"])
    assert newest["values"]["loss"] == 3.0
    assert newest["step"] == 3


async def test_a_sink_that_hangs_falls_behind_and_nobody_waits(run: Run, monkeypatch: pytest.MonkeyPatch):
    import threading

    release, taken = threading.Event(), list[Told]()
    monkeypatch.setattr(follow, "AHEAD", 8)

    class Hangs:
        def take(self, batch: list[Told]) -> None:
            release.wait(600)
            taken.extend(batch)

        def close(self) -> None:
            pass

    following = asyncio.create_task(Follower(run, Hangs(), Position(), ("metrics",)).follow())
    try:
        await say(run, *range(50))
        await run.set_state("finished")
        assert taken == []
    finally:
        release.set()
    await asyncio.wait_for(following, DEADLINE_S)
    assert [told.seq for told in taken] == list(range(1, 51))


async def test_a_position_survives_and_a_foreign_file_is_refused(tmp_path: Path):
    position = Position.load(tmp_path / "p.json")
    position.passed([Told("metrics", 7, Metric("a", "a", None, {}, 0.0))])
    assert Position.load(tmp_path / "p.json").seqs == {"metrics": 7, "events": 0}
    (tmp_path / "p.json").write_text("[]")
    with pytest.raises(ValueError, match=r"p\.json: not the position of a sink"):
        Position.load(tmp_path / "p.json")
    (tmp_path / "notes.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ValueError, match=r"notes\.jsonl:1: not a line of this sink"):
        JsonLines(tmp_path / "notes.jsonl")


async def test_prometheus_scrapes_a_run(run: Run):
    urls: list[str] = []
    serving = asyncio.create_task(serve_metrics(run, "127.0.0.1", 0, urls.append))
    await say(run, 5)

    def scrape(path: str = "/metrics") -> str:
        with urllib.request.urlopen(urls[0] + path, timeout=60) as answer:
            return answer.read().decode()

    async def has_all() -> bool:
        text = await asyncio.to_thread(scrape) if urls else ""
        return "slipstream_trainer_loss" in text and "slipstream_queue_messages" in text and "events_total" in text

    await until(has_all, "the loss is scraped", DEADLINE_S)
    assert await asyncio.to_thread(scrape, "/health") == "ok\n"
    await run.set_state("finished")
    await asyncio.wait_for(serving, DEADLINE_S)
