"""Engine processes come up, say why they do not, and never outlive whoever started them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from services.rollout.engines import process as process_module
from services.rollout.engines.client import EngineClient, EngineDead
from services.rollout.engines.process import EngineProcess, EngineStartError, Launch, flags
from tests.processes import ended
from tests.rollout.tiny import FOREVER, until


def test_options_become_flags_under_their_own_names() -> None:
    options = {"max_total_tokens": 5, "enable-x": True, "off": False, "none": None, "list": [1, 2]}
    assert flags(options) == ["--max-total-tokens", "5", "--enable-x", "--list", "1", "2"]


async def test_a_process_serves_and_ends_cleanly_answering_what_runs(model) -> None:
    engine = await EngineProcess.start("light", model.folder, {"weight_version": "3", "max_running_requests": 7})
    assert engine.alive
    async with EngineClient(engine.url) as client:
        assert (await client.model_info())["weight_version"] == "3"
        assert (await client.server_info())["max_running_requests"] == 7
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": FOREVER, "ignore_eos": True}}
        long = asyncio.create_task(client.generate(body))
        while (await client.load())["num_running_reqs"] == 0:
            assert not long.done()
        assert await engine.stop(120) == 0
        (answer,) = await long
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        with pytest.raises(EngineDead):
            await client.load()
    assert not engine.alive


async def test_a_killed_engine_is_noticed(model) -> None:
    engine = await EngineProcess.start("light", model.folder)
    async with EngineClient(engine.url) as client:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": FOREVER, "ignore_eos": True}}
        long = asyncio.create_task(client.generate(body))
        while (await client.load())["num_running_reqs"] == 0:
            assert not long.done()
        os.kill(engine.pid, signal.SIGKILL)
        with pytest.raises(EngineDead):
            await long
    assert await asyncio.wait_for(engine.wait(), 60) == -signal.SIGKILL
    assert await engine.stop() == -signal.SIGKILL


async def test_a_failing_start_shows_the_last_words(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="(?s)exit code 2.*a Hugging Face model folder is needed") as caught:
        await EngineProcess.start("light", tmp_path)
    assert "--model" in str(caught.value)
    with pytest.raises(EngineStartError, match="'vllm' cannot be started here; known are light"):
        await EngineProcess.start("vllm", tmp_path)


async def test_an_engine_that_never_gets_ready_is_ended_with_its_children(tmp_path: Path, monkeypatch) -> None:
    pids = tmp_path / "pids"
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "print('still loading', file=sys.stderr, flush=True)\n"
        "time.sleep(600)\n"
    )
    slow = Launch([sys.executable, "-c", script], url="http://127.0.0.1:9")
    monkeypatch.setitem(process_module.COMMANDS, "slow", lambda *_: slow)
    for patience in (1, 4, 16, 64):  # a slow machine needs some of it to come as far as this
        with pytest.raises(EngineStartError, match=f"not ready within {patience} s") as caught:
            await EngineProcess.start("slow", tmp_path, ready_timeout_s=patience)
        if "still loading" in str(caught.value):
            break
    assert "still loading" in str(caught.value)
    parent, child = map(int, pids.read_text().split())
    await until(lambda: all(map(ended, (parent, child))))


async def test_an_engine_dies_with_the_process_that_started_it(model) -> None:
    script = (
        "import asyncio, sys, time\n"
        "from services.rollout.engines.process import EngineProcess\n"
        "async def main():\n"
        "    engine = await EngineProcess.start('light', sys.argv[1])\n"
        "    print(engine.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    command = (sys.executable, "-c", script, str(model.folder))
    starter = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert starter.stdout is not None
        pid = int(await starter.stdout.readline())
        assert not ended(pid)
    finally:
        starter.kill()
        await starter.wait()
    await until(lambda: ended(pid))
