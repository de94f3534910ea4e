"""Faults that are no death: what hangs, what is full, what poisons, and clocks that jump. The real system, each with its outcome.

A scoring process that leaks: tests/reward/test_pool.py. Outages longer than every deadline: tests/shared/test_transfer_queue.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.system import DEADLINE_S, System
from tests.shared.runs import until

GROUPS = 16
PLAIN = ("trainer.warm_start=null", "eval.prompts=null")
"""What is learnt does not matter here, so nobody waits for the supervised phase."""
FOR_EVER = "steps=5000"
SILENT_S = 20.0
"""Twice as long as a service should be silent on a machine with a lot to do."""


def assert_sound(report: dict[str, Any]) -> None:
    assert report["faults"] == []
    assert report["balanced"]
    assert report["staleness_max"] <= report["staleness_bound"]


async def test_what_is_stopped_is_found_by_its_silence_and_replaced(tmp_path: Path):
    async with System(tmp_path, *PLAIN, FOR_EVER, f"heartbeat_ttl_s={SILENT_S}") as system, system.attached() as run:
        await system.trains(run, GROUPS)
        for replica in ("rollout-0", "reward-0", "controller-0", "dcs-0", "trainer-0"):
            await system.kill(replica, signal.SIGSTOP)
            await system.says(f"{replica} died (hung: its process lived without a heartbeat for")
            await system.says(f"{replica} is back after")
        await system.kill("engine", signal.SIGSTOP)
        await system.happens(run, "engine_died", "rollout-0")
        await system.kill("broker", signal.SIGSTOP)
        await system.says("the broker lived without a word for")
        before = len(system.text)
        await until(lambda: "\nstep " in system.text[before:], "the run goes on", DEADLINE_S)
        assert_sound(await system.stops())
    causes = {event["replica"]: event["detail"]["cause"] for event in await system.events("--kind", "exit")}
    assert all(cause.startswith("hung") for cause in causes.values())
    assert set(causes) == {"rollout-0", "reward-0", "controller-0", "dcs-0", "trainer-0"}, "nobody else was touched"


async def test_a_consumer_that_sleeps_longer_than_its_messages_wait(tmp_path: Path):
    """A newcomer, which nobody supervises here, wakes up with groups in its hands that others have long finished."""
    async with System(tmp_path, *PLAIN, FOR_EVER, "redeliver_after_s=5") as system, system.attached() as run:
        await system.trains(run, GROUPS)
        newcomer = await system.cli("serve", "rollout", "--nats", run.url, "--run", run.name, "--replica", "newcomer")
        try:
            await system.happens(run, "joined", "newcomer")
            for _ in range(10):
                await system.trains(run, 4, by="newcomer")
                newcomer.send_signal(signal.SIGSTOP)
                await asyncio.sleep(7.0)  # its messages' time is up
                newcomer.send_signal(signal.SIGCONT)
                if system.text.count("messages for rollout came again") >= 2:
                    break
            await system.trains(run, 4, by="newcomer")
            newcomer.terminate()
            assert await newcomer.wait() == 0
            await system.trains(run, 3 * GROUPS)
            report = await system.stops()
        finally:
            with suppress(ProcessLookupError):
                newcomer.kill()
            await newcomer.wait()
    assert_sound(report)
    assert report["dropped"] == {}
    assert await system.events("--kind", "redelivered"), "what it held went to others"


async def test_streams_at_their_limits_make_writers_wait_and_nobody_is_accused(tmp_path: Path):
    async with System(tmp_path, *PLAIN, "steps=40") as system:
        async with system.attached() as run:
            await system.trains(run, GROUPS)
            for name in ("prompts", "rewards"):
                stream = run.subjects.stream(name)
                config = (await run.connection.api(f"STREAM.INFO.{stream}"))["config"]
                await run.connection.api(f"STREAM.UPDATE.{stream}", config | {"max_msgs": 2})
        report = await system.ends()
    assert_sound(report)
    assert (report["trained"], report["pending"], report["dropped"]) == (40 * GROUPS, 0, {})
    assert await system.events("--kind", "hung", "--kind", "exit") == []


async def test_groups_that_kill_or_break_their_consumer_end_as_dead_letters_alone(tmp_path: Path):
    poison = {"TEST_KILLS_ENGINE": "0-20", "TEST_KILLS_ROLLOUT": "0-40", "TEST_BREAKS_ROLLOUT": "0-60"}
    async with System(tmp_path, *PLAIN, "steps=6", "redeliver_after_s=5", spoilt=poison) as system:
        report = await system.ends()
    assert_sound(report)
    assert report["dropped"] == {"dead:rollout": 3}, "each costs itself only, and its credit came back"
    assert report["trained"] == 6 * GROUPS
    dropped = await system.events("--kind", "dropped")
    assert {event["detail"]["group"] for event in dropped} == set(poison.values())
    assert all(event["detail"]["deliveries"] >= 6 for event in dropped)


async def test_clocks_that_jump_decide_nothing(tmp_path: Path):
    clocks = tmp_path / "clocks"
    clocks.mkdir()
    async with System(tmp_path, *PLAIN, "steps=60", spoilt={"TEST_CLOCKS": str(clocks)}) as system:
        async with system.attached() as run:
            await system.trains(run, 2 * GROUPS)
            hours = {"up": 2, "dcs": -3, "rollout": 4, "trainer": -5, "controller": 1000, "reward": -1000}
            for sign in (1, -1):
                for part, offset in hours.items():
                    (clocks / part).write_text(str(sign * offset * 3600))
                await system.trains(run, 20 * GROUPS)
        report = await system.ends()
    assert_sound(report)
    assert (report["trained"], report["dropped"]) == (60 * GROUPS, {})
    assert await system.events("--kind", "hung", "--kind", "exit", "--kind", "member_dropped") == []
    by_broadcast = [
        replica["how"] == "broadcast"
        for version in report["versions"]
        if version["step"] > 1
        for replica in version["holders"].values()
    ]
    assert all(by_broadcast), "a receiver took a broadcast for a thing of the past"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own under the broker's store."""
    store = tmp_path / "runs/sort-letters/broker"
    store.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(store)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    yield store
    subprocess.run(["umount", "--lazy", str(store)], check=True)


async def test_a_full_disk_under_the_broker_is_waited_for(tmp_path: Path, small_disk: Path):
    sets = (*PLAIN, "steps=60", f"heartbeat_ttl_s={SILENT_S}", "broker.max_bytes=100000000")
    async with System(tmp_path, *sets) as system:
        async with system.attached() as run:
            await system.trains(run, 2 * GROUPS)
        ballast = small_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        await system.says("the disk of the broker is full")
        await asyncio.sleep(2 * SILENT_S)  # whoever is silent for half as long is taken for hung
        assert system.running
        os.unlink(ballast)
        report = await system.ends()
    assert_sound(report)
    assert (report["trained"], report["pending"]) == (60 * GROUPS, 0)
    assert system.text.count("the disk of the broker is full") == 1
    assert await system.events("--kind", "exit") == [], "nobody died of it"
