"""The demo as actors of a Ray cluster on this machine: scaled out and in through the REST API, and an actor killed.

`make test-ray`: needs the extra `ray`, and a minute or two.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import psutil
import pytest

from services.controller.attach import Run
from tests.e2e.test_run import DEADLINE_S, EXAMPLE, GROUPS, Example, example, heartbeat, until_trained  # noqa: F401
from tests.shared.runs import until

pytestmark = pytest.mark.ray
STEPS = 2000
"""Until the test ends the run."""


async def ask(run: Run, method: str, path: str, **body: Any) -> dict[str, Any]:
    (beat,) = await run.registry.alive("controller")
    async with httpx.AsyncClient(base_url=beat.detail["url"], timeout=30) as client:
        answer = await client.request(method, path, json=body or None)
        assert answer.status_code < 300, answer.text
        return answer.json()


async def scaled(run: Run, path: str, **body: Any) -> dict[str, Any]:
    """An operation, to its end."""
    found = await ask(run, "POST", path, **body)

    async def over() -> bool:
        found.update(await ask(run, "GET", f"{path}/{found['request_id']}"))
        return found["status"] in ("ACTIVE", "COMPLETED", "PARTIAL", "FAILED")

    await until(over, f"{path} ends", DEADLINE_S)
    return found


async def test_two_replicas_one_more_one_less_and_one_killed(example: Example) -> None:  # noqa: F811
    sets = (f"steps={STEPS}", "trainer.warm_start.steps=40", "eval.prompts=null", "heartbeat_ttl_s=10")
    options = [part for value in (*sets, f"model.path={example.folder}/model") for part in ("--set", value)]
    up = await example.cli(
        "up", str(EXAMPLE), *options, "--report", str(example.report), "--launcher", "ray", "--address", "local"
    )
    async with example.attached() as run:
        await until_trained(run, 2 * GROUPS)
        more = await scaled(run, "/rollout/scale_out", num_replicas=3)
        assert more["status"] == "ACTIVE", more
        assert more["engine_ids"] == ["rollout-2"]
        beat = await heartbeat(run, "rollout-2")
        assert beat is not None
        actor = psutil.Process(beat.pid).parent()
        assert actor is not None
        assert "ray::" in " ".join(actor.cmdline()), "the service is the child of an actor"
        os.kill(actor.pid, signal.SIGKILL)

        async def replaced() -> bool:
            now = await heartbeat(run, "rollout-2")
            return now is not None and now.pid != beat.pid and now.state in ("idle", "sampling")

        await until(replaced, "another actor takes its place", DEADLINE_S)
        less = await scaled(run, "/rollout/scale_in", num_replicas=2)
        assert less["status"] == "COMPLETED", less
        assert less["removed_engines"] == ["rollout-2"]
        print(f"scale out {more['seconds']}, in {less['seconds']}")
        up.send_signal(signal.SIGINT)
        async with asyncio.timeout(DEADLINE_S):
            await up.wait()
    output = (example.folder / "output.txt").read_text()
    assert up.returncode == 130, output[-4000:]
    report = json.loads(example.report.read_text())
    assert report["balanced"], report["faults"]
    assert report["faults"] == []
    assert report["trained"] > 2 * GROUPS
