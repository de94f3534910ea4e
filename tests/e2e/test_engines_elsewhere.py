"""Engines that somebody else runs, on the whole system: registered by URL in mid-run, killed and started again, let go.

One that nobody answers for and one that serves another model fail their operations with their reasons, and the run goes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections import Counter
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save_file

from services.controller.attach import Run
from services.controller.launchers.broker import free_port
from shared import wire
from shared.records import Event, Receipt
from tests.e2e.test_run import DEADLINE_S, EXAMPLE, GROUPS, Example, example, until_trained  # noqa: F401
from tests.shared.runs import beside, until

STEPS = 5000
"""Until the test ends the run."""
IN_FLIGHT = 2 * GROUPS
"""At most: staleness 1."""
NOBODY = "http://127.0.0.1:9"


class Engine:
    """`python -m services.rollout.engines.light`, started by hand. Below the ports that the system hands out, so that it comes
    back where it was."""

    def __init__(self, example: Example, model: Path) -> None:  # noqa: F811 - the fixture's name
        self.example, self.model, self.port = example, model, 0
        self.process: Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.port = self.port or free_port()
        words = ("--model", str(self.model), "--port", str(self.port), "--device", "cpu", "--threads", "1")
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.rollout.engines.light", *words),
            cwd=self.example.folder,
            env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[2]), "OMP_NUM_THREADS": "1"},
            stdin=DEVNULL,
            stdout=(self.example.folder / "output.txt").open("ab"),
            stderr=STDOUT,
        )
        self.example.processes.append(self.process)
        await until(self.healthy, f"the engine at {self.url} answers", DEADLINE_S)

    async def healthy(self) -> bool:
        try:
            async with httpx.AsyncClient(timeout=60) as client:
                return (await client.get(f"{self.url}/health")).status_code == 200
        except httpx.HTTPError:
            return False

    async def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


def shallower(model: Path, folder: Path) -> Path:
    """The same model without its last layer: another one."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    last = config["num_hidden_layers"] = config["num_hidden_layers"] - 1
    config.pop("layer_types", None)
    tensors = load_file(model / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if not name.startswith(f"model.layers.{last}.")}
    save_file(kept, folder / "model.safetensors")
    for file in model.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def ask(run: Run, path: str, **body: Any) -> dict[str, Any]:
    """The controller's answer: POST with a body, GET without."""
    (beat,) = await run.registry.alive("controller")
    async with httpx.AsyncClient(base_url=beat.detail["url"], timeout=60) as client:
        answer = await client.post(path, json=body) if body else await client.get(path)
    assert answer.status_code < 300, answer.text
    return answer.json()


async def over(run: Run, path: str, **body: Any) -> dict[str, Any]:
    """An operation, to its end."""
    made = await ask(run, path, **body)
    one = "/rollout/scale_in" if path.endswith("scale_in") else "/rollout/scale_out"
    found: dict[str, Any] = {}

    async def ended() -> bool:
        found.update(await ask(run, f"{one}/{made['request_id']}"))
        return found["status"] in ("ACTIVE", "COMPLETED", "PARTIAL", "FAILED", "NOOP")

    await until(ended, f"{path} {body} ends", DEADLINE_S)
    return found


class Witness:
    """Counts, by replica, groups that were trained on and how often it began to serve."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.trained, self.joined = Counter[str](), Counter[str]()

    def listening(self) -> AbstractAsyncContextManager[None]:
        return beside(self._receipts(), self._events())

    async def _receipts(self) -> None:
        async for data, _ in self.run.queue.read("receipts", live=True):
            receipt = wire.decode(data, Receipt)
            self.trained[receipt.replica] += receipt.kind == "trained"

    async def _events(self) -> None:
        async for data, _ in self.run.queue.read("events", live=True):
            event = wire.decode(data, Event)
            self.joined[event.replica] += event.kind == "joined"


async def test_engines_that_run_elsewhere_come_die_return_and_leave(example: Example) -> None:  # noqa: F811
    up = await example.up(f"steps={STEPS}", "trainer.warm_start.steps=40", "eval.prompts=null", "rollout.replicas=1")
    async with example.attached() as run, (seen := Witness(run)).listening():
        await until_trained(run, GROUPS)
        model = example.folder / "model"
        good, other = Engine(example, model), Engine(example, shallower(model, example.folder / "other"))
        await asyncio.gather(good.start(), other.start())

        nobody, mixed = await asyncio.gather(
            over(run, "/rollout/engines", urls=[NOBODY]), over(run, "/rollout/engines", urls=[good.url, other.url])
        )
        assert nobody["status"] == "FAILED", nobody
        assert "cannot be reached" in nobody["message"]
        assert mixed["status"] == "PARTIAL", mixed
        assert "serves another model" in mixed["message"]
        (replica,) = mixed["engine_ids"]
        assert (await over(run, "/rollout/engines", urls=[f"{good.url}/"]))["status"] == "NOOP", "it is registered"

        await until(lambda: seen.trained[replica], "its groups are trained on", DEADLINE_S)
        times = seen.joined[replica]
        await good.kill()
        await good.start()
        await until(lambda: seen.joined[replica] > times, "it came back with the newest weights", DEADLINE_S)
        before = seen.trained[replica]
        await until(lambda: seen.trained[replica] > before + IN_FLIGHT, "its new groups are trained on", DEADLINE_S)
        left = await over(run, "/rollout/scale_in", engine_urls=[good.url])
        assert (left["status"], left["removed_engines"]) == ("COMPLETED", [replica])
        assert await good.healthy(), "whoever runs the engine keeps it"
        up.send_signal(signal.SIGINT)
        await until(lambda: up.returncode is not None, "the run drains", DEADLINE_S)
    output = (example.folder / "output.txt").read_text()
    assert up.returncode == 130, output[-4000:]
    report = json.loads(example.report.read_text())
    assert report["balanced"], report["faults"]
    assert report["faults"] == []
    assert report["replicas"][replica]["trained"] > IN_FLIGHT
    assert report["staleness_max"] <= 1
