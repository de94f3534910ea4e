"""Scoring processes that hang, crash and are killed: only the guilty sample pays, and the pool stays whole."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from services.reward.pool import Died, Job, Pool, Worker
from services.reward.scoring import FunctionError, Outcome
from shared.config import RunConfig, parse
from tests.processes import ended
from tests.shared.runs import until

ROOT = str(Path(__file__).parents[2])
SHORT_S = 3.0
"""Where something hangs. Whatever does not has to answer in this time also on a bad day."""


def run_config(*functions: str, workers: int = 1, timeout_s: float = 60.0, **options: Any) -> RunConfig:
    entries = [{"path": f"tests.reward.functions.{name}", "options": options} for name in functions]
    data = {"run": "t", "steps": 1, "groups_per_step": 1, "samples_per_group": 2, "base": ROOT}
    data |= {"model": {"path": "m"}, "prompts": {"source": "a.b"}}
    return parse(data | {"reward": {"functions": entries, "workers": workers, "timeout_s": timeout_s}}, "test")


def job(*completions: str, **shared: Any) -> Job:
    samples = [{"completion": text, "finish": "stop", "index": i} for i, text in enumerate(completions)]
    return Job({"prompt": "p", "answer": "a", "meta": {}} | shared, samples)


def scores(outcomes: list[Outcome]) -> list[Any]:
    return [outcome.kind or outcome.score for outcome in outcomes]


async def test_functions_and_samples_in_their_order() -> None:
    async with Pool(run_config("right", "acts")) as pool:
        first, second = await pool.score(job("int", "a", "numpy", answer="numpy"))
    assert scores(first) == [0, 0, 1]
    assert scores(second) == [2, "raised", 0.5]
    assert pool.pids == []


async def test_hangs_are_killed_and_the_pool_stays_whole() -> None:
    async with Pool(run_config("acts", workers=2, timeout_s=SHORT_S)) as pool:
        before = set(pool.pids)
        found = await asyncio.gather(
            pool.score(job("int", "sleep", "int", "spin", "int")),
            pool.score(job("sleep")),
            pool.score(job("int", "none")),
        )
        assert [scores(one[0]) for one in found] == [
            [2, "timeout", 2, "timeout", 2],
            ["timeout"],
            [2, "not_a_number"],
        ]
        assert len(pool.pids) == 2
        assert not before & set(pool.pids)
        assert pool.kills == 3
        assert "longer than 3 s" in found[1][0][0].error


async def test_time_in_which_the_service_stood_still_does_not_count(tmp_path: Path, monkeypatch) -> None:
    loop, slept_s = asyncio.get_running_loop(), 0.0
    real = loop.time
    monkeypatch.setattr(loop, "time", lambda: real() + slept_s)
    async with Pool(run_config("waits")) as pool:
        scoring = asyncio.create_task(pool.score(job(str(tmp_path / "go"))))
        await until((tmp_path / "go.asked").exists, "it is called")
        for _ in range(3):
            slept_s += 3600
            await asyncio.sleep(0.01)
        (tmp_path / "go").touch()
        assert [scores(one) for one in await scoring] == [[1]]
        assert pool.kills == 0


async def test_a_crash_costs_one_sample() -> None:
    async with Pool(run_config("acts")) as pool:
        (found,) = await pool.score(job("int", "die", "int", "kill", "exit"))
        assert scores(found) == [2, "died", 2, "died", "raised"]
        assert "exit code 7" in found[1].error
        assert "signal 9" in found[3].error
        assert pool.deaths == 4
        assert len(pool.pids) == 1


async def test_a_process_that_somebody_else_killed_costs_nothing(tmp_path: Path) -> None:
    async with Pool(run_config("dies_once")) as pool:
        (found,) = await pool.score(job("one", "two", meta={"folder": str(tmp_path)}))
        assert scores(found) == [1, 1]
        os.kill(pool.pids[0], signal.SIGKILL)
        (found,) = await pool.score(job("one", meta={"folder": str(tmp_path)}))
        assert scores(found) == [1]


async def test_what_user_code_prints_is_no_protocol() -> None:
    async with Pool(run_config("acts")) as pool:
        assert scores((await pool.score(job("print", "int")))[0]) == [1, 2]


async def test_async_functions_run_side_by_side() -> None:
    completions = [str(number) for number in range(40)]
    async with Pool(run_config("meets")) as pool:
        (found,) = await pool.score(job(*completions, completions=completions))
        assert scores(found) == list(range(40))


async def test_async_functions_have_the_same_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config("acts_async", timeout_s=SHORT_S)
    with monkeypatch.context() as patched:
        patched.setattr("services.reward.pool.GRACE_S", 60.0)  # the process ends its calls by itself
        async with Pool(config) as pool:
            (found,) = await pool.score(job("fine", "wait", "own", "raise", "fine"))
            assert scores(found) == [1, "timeout", "raised", "raised", 1]
            assert pool.kills == 0
    async with Pool(config) as pool:
        (found,) = await pool.score(job("fine", "spin", "fine", "die", "exit"))
        assert scores(found) == [1, "timeout", 1, "died", "raised"]
        assert len(pool.pids) == 1


async def test_a_cancelled_call_leaves_a_whole_pool() -> None:
    async with Pool(run_config("acts")) as pool:
        task = asyncio.create_task(pool.score(job("sleep")))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert scores((await pool.score(job("int")))[0]) == [2]


async def test_functions_that_cannot_be_used_are_told_at_the_start() -> None:
    for name, told in [("nothing", "cannot import"), ("wants_more", "asks for 'tools'")]:
        with pytest.raises(FunctionError, match=rf"reward\.functions\[0\].*{told}"):
            async with Pool(run_config(name)):
                pass


async def test_no_process_outlives_the_service() -> None:
    """Not even one whose parent was killed while it was in the middle of a call that never ends."""
    code = (
        "import asyncio, tests.reward.test_pool as t\n"
        "async def main():\n"
        "    async with t.Pool(t.run_config('acts', workers=2, timeout_s=600)) as pool:\n"
        "        print(*pool.pids, flush=True)\n"
        "        await pool.score(t.job('spin'))\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    try:
        assert parent.stdout is not None
        line = await asyncio.wait_for(parent.stdout.readline(), 120)
        workers = [int(pid) for pid in line.split()]
        assert len(workers) == 2
    finally:
        parent.kill()
        await parent.wait()
    await until(lambda: all(map(ended, workers)), "the workers are gone", 60)


async def test_groups_are_spread_over_the_processes() -> None:
    async with Pool(run_config("pid", workers=3)) as pool:
        found = await asyncio.gather(*(pool.score(job("x")) for _ in range(12)))
        assert {one[0][0].score for one in found} == set(map(float, pool.pids))


async def test_a_process_that_leaks_is_replaced_between_requests_and_costs_nothing(monkeypatch) -> None:
    monkeypatch.setattr("services.reward.pool.WEIGH_S", 0.01)
    config = run_config("leaks", mb=20)
    config.reward.memory_mb = 256
    async with Pool(config) as pool:
        pids = set(pool.pids)
        for _ in range(14):
            found = await pool.score(job("a"))
            assert scores(found[0]) == [1.0]
            await asyncio.sleep(0.05)  # it is weighed
            pids |= set(pool.pids)
        assert len(pids) >= 2
        assert pool.deaths == pool.kills == 0
        assert "MB, reward.memory_mb is 256" in pool.replaced[0]


async def test_a_call_that_takes_all_memory_costs_its_own_sample(monkeypatch) -> None:
    monkeypatch.setattr("services.reward.pool.WEIGH_S", 0.05)
    config = run_config("leaks", mb=1)
    config.reward.memory_mb = 256
    async with Pool(config) as pool:
        found = await pool.score(job("a", "bloat", "b"))
        assert scores(found[0]) == [1.0, "died", 1.0]
        assert "MB, reward.memory_mb is 256" in found[0][1].error
        assert len(pool.pids) == 1


async def test_a_process_killed_while_it_starts_is_started_again(monkeypatch) -> None:
    started = Worker.start
    kills = 2

    async def start(hello: dict[str, Any]) -> Worker:
        nonlocal kills
        if kills:
            kills -= 1
            raise Died("killed by signal 9", True)
        return await started(hello)

    monkeypatch.setattr(Worker, "start", start)
    async with Pool(run_config("right")) as pool:
        assert scores((await pool.score(job("a")))[0]) == [1]
    kills = 99
    with pytest.raises(FunctionError, match="killed by signal 9"):
        async with Pool(run_config("right")):
            pass
