"""Scale operations over a real broker: the REST API, what outlives a controller that is killed, and the launcher's side.

Replicas are stand-ins: `Replicas` starts what is wanted as heartbeats, as a launcher would start processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.controller.scaling.operation import Operation
from services.controller.scaling.routes import router
from services.controller.scaling.scaler import KeyReused, Scaler, running
from shared import wanted
from shared.broker import EmbeddedBroker
from shared.errors import Conflict
from shared.jetstream import Connection
from shared.records import Heartbeat, Receipt
from shared.service import Context
from tests.controller.pipeline import open_context, run_config
from tests.shared.runs import until

Connect = Callable[..., Awaitable[Connection]]
DEADLINE_S = 60.0


class Replicas:
    """A launcher and all replicas of a run, as the registry shows them."""

    def __init__(self, ctx: Context, count: int = 2) -> None:
        self.ctx, self.count = ctx, count
        self.up = "idle"
        """How far newcomers come."""
        self.stubborn: set[str] = set()
        """They do not leave when they are asked to."""
        self.gone: dict[str, str] = {}
        self.refused = ""
        """Why workers of engines elsewhere cannot run."""
        self.started: dict[str, float] = {}
        self.version = 3

    async def run(self) -> None:
        def first(_: wanted.Wanted) -> wanted.Wanted:
            spec = {"service": "rollout", "by": "", "engine_url": ""}
            return wanted.Wanted({f"rollout-{n}": dict(spec) for n in range(self.count)})

        await wanted.change(self.ctx.kv, first)
        while True:
            await self.turn()
            await asyncio.sleep(0.05)

    async def turn(self) -> None:
        registry, now = self.ctx.registry, time.time()
        record = wanted.load(await self.ctx.kv.get(wanted.KEY))
        elsewhere = [name for name, spec in record.replicas.items() if spec["engine_url"]]
        self.gone = dict.fromkeys(elsewhere, self.refused) if self.refused else {}
        await registry.present(wanted.Launcher("test", "local", dict(self.gone)))
        await registry.beat(Heartbeat("dcs", "dcs-0", "serving", 0, self.version, 0, {}, "h", 1, now, now))
        for name in [name for name in self.started if name not in record.replicas]:
            if name not in self.stubborn or (name in record.killed and "for ever" not in self.stubborn):
                del self.started[name]
                await registry.leave(name.partition("-")[0], name)
        for name, spec in record.replicas.items():
            if name in self.gone or not self.up:
                continue
            began = self.started.setdefault(name, now)
            beat = Heartbeat(spec["service"], name, self.up, 0, self.version, 0, {}, "h", 1, began, now)
            await registry.beat(beat)
        for name in set(self.started) - record.replicas.keys():
            await registry.beat(Heartbeat("rollout", name, "sampling", 0, 3, 0, {}, "h", 1, self.started[name], now))


class Api:
    """The controller's side: a scaler and its API, which may be killed and replaced."""

    def __init__(self, open_one: Callable[[], Awaitable[Context]]) -> None:
        self._open = open_one
        self._stack = contextlib.AsyncExitStack()
        self.scaler: Scaler

    async def start(self) -> None:
        self.scaler = Scaler(await self._open())
        await self.scaler.restore()
        app = FastAPI()
        app.include_router(router(self.scaler))
        transport = httpx.ASGITransport(app)
        self.client = await self._stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://c"))
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        async with running(self.scaler.run()):
            await asyncio.Event().wait()

    async def kill(self) -> None:
        """At an await, as a process would be between two of its messages."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def close(self) -> None:
        await self.kill()
        await self._stack.aclose()

    async def post(self, path: str, code: int = 202, key: str | None = None, **body: Any) -> dict[str, Any]:
        answer = await self.client.post(path, json=body, headers={"Idempotency-Key": key} if key else {})
        assert answer.status_code == code, answer.text
        return answer.json()

    async def get(self, path: str, code: int = 200) -> dict[str, Any]:
        answer = await self.client.get(path)
        assert answer.status_code == code, answer.text
        return answer.json()

    async def reaches(self, path: str, *states: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def there() -> bool:
            found.update(await self.get(path))
            return found["status"] in states

        await until(there, f"{path} reaches {states}", DEADLINE_S)
        return found


@pytest.fixture
def opener(broker: EmbeddedBroker, connect: Connect, tmp_path: Path, run_name: str) -> Callable[..., Any]:
    async def open_one(service: str = "controller") -> Context:
        config = run_config(run_name, str(tmp_path), heartbeat_ttl_s=600.0)
        return await open_context(await connect(broker.url), config, service, "x")

    return open_one


@pytest.fixture
async def replicas(opener: Callable[..., Any]) -> AsyncIterator[Replicas]:
    one = Replicas(await opener("rollout"))
    task = asyncio.create_task(one.run())
    await until(lambda: len(one.started) == one.count, "the first replicas", DEADLINE_S)
    yield one
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def api(opener: Callable[..., Any], replicas: Replicas) -> AsyncIterator[Api]:
    one = Api(opener)
    await one.start()
    yield one
    await one.close()


async def test_out_and_in_again_with_repeats_and_the_time_to_the_first_group(api: Api, replicas: Replicas):
    made = await api.post("/rollout/scale_out", key="more", num_replicas=4)
    assert made["status"] == "PENDING"
    assert (await api.post("/rollout/scale_out", 200, key="more", num_replicas=4))["request_id"] == made["request_id"]
    refused = await api.post("/rollout/scale_out", 409, key="more", num_replicas=5)
    assert "take another key" in refused["detail"]
    done = await api.reaches(f"/rollout/scale_out/{made['request_id']}", "ACTIVE")
    assert done["engine_ids"] == ["rollout-2", "rollout-3"]
    assert done["weight_version"] == 3
    assert list(done["seconds"])[-1] == "ACTIVE"
    engines = await api.get("/rollout/engines")
    assert engines["num_replicas"] == 4
    assert [one["replica"] for one in engines["engines"]] == [f"rollout-{n}" for n in range(4)]
    noop = await api.post("/rollout/scale_out", num_replicas=4)
    assert "already" in (await api.reaches(f"/rollout/scale_out/{noop['request_id']}", "NOOP"))["message"]
    api.scaler.saw(Receipt("trained", "0-1", replica="rollout-3", at=made["created_at"] + 7.5))
    await until(
        lambda: api.scaler.operations[made["request_id"]].first_trained == {"rollout-3": 7.5}, "the measurement"
    )
    trial = await api.post("/rollout/scale_in", 200, num_replicas=1, dry_run=True)
    assert trial["selected_engines"] == ["rollout-3", "rollout-2", "rollout-1"]
    less = await api.post("/rollout/scale_in", num_replicas=1)
    gone = await api.reaches(f"/rollout/scale_in/{less['request_id']}", "COMPLETED")
    assert sorted(gone["removed_engines"]) == ["rollout-1", "rollout-2", "rollout-3"]
    assert replicas.started.keys() == {"rollout-0"}
    listed = await api.get("/rollout/scale_out")
    assert [one["status"] for one in listed["requests"]] == ["NOOP", "ACTIVE"]
    assert (await api.get("/rollout/scale_out?status=ACTIVE"))["total_count"] == 1


@pytest.mark.parametrize("state", ["", "starting", "fetching weights", "idle"])
async def test_a_controller_that_is_killed_in_each_state_goes_on(api: Api, replicas: Replicas, state: str):
    replicas.up = state
    path = f"/rollout/scale_out/{(await api.post('/rollout/scale_out', key='k', num_replicas=3))['request_id']}"
    reached = {"": "CREATING", "starting": "HEALTH_CHECKING", "fetching weights": "WEIGHT_SYNCING", "idle": "READY"}
    await api.reaches(path, reached[state], "ACTIVE")
    await api.kill()
    await api.start()
    assert (await api.post("/rollout/scale_out", 200, key="k", num_replicas=3))["request_id"] in path
    replicas.up = "idle"
    assert (await api.reaches(path, "ACTIVE"))["engine_ids"] == ["rollout-2"]
    record = wanted.load(await replicas.ctx.kv.get(wanted.KEY))
    assert list(record.replicas) == ["rollout-0", "rollout-1", "rollout-2"]


async def test_a_controller_that_is_killed_while_a_drain_times_out(api: Api, replicas: Replicas):
    replicas.stubborn = {"rollout-1"}
    path = f"/rollout/scale_in/{(await api.post('/rollout/scale_in', num_replicas=1, timeout_secs=0.5))['request_id']}"
    await api.reaches(path, "DRAINING", "REMOVING")
    await api.kill()
    await api.start()
    done = await api.reaches(path, "COMPLETED")
    assert done["removed_engines"] == ["rollout-1"]
    assert "did not drain within 0.5 s" in done["message"]
    assert list(done["seconds"]) == ["PENDING", "DRAINING", "REMOVING", "COMPLETED"]


async def test_cancelling_takes_newcomers_back(api: Api, replicas: Replicas):
    replicas.up = "fetching weights"
    made = await api.post("/rollout/scale_out", num_replicas=3)
    path = f"/rollout/scale_out/{made['request_id']}"
    await api.reaches(path, "WEIGHT_SYNCING")
    assert (await api.post(f"{path}/cancel", 200))["status"] == "REMOVING"
    assert (await api.post(f"{path}/cancel", 200))["status"] in ("REMOVING", "CANCELLED")
    await api.reaches(path, "CANCELLED")
    assert (await api.post(f"{path}/cancel", 200))["status"] == "CANCELLED", "may be repeated"
    await until(lambda: "rollout-2" not in replicas.started, "the newcomer left")
    await api.post("/rollout/scale_out/unknown/cancel", 404)
    await api.get(f"/reward/scale_out/{made['request_id']}", 404)


async def test_engines_elsewhere(api: Api, replicas: Replicas):
    """Unreachable, or serving another model: the worker that attends to it says so and leaves (tests/rollout)."""
    body = {"urls": ["http://10.0.0.7:30000/", "http://10.0.0.7:30000"], "timeout_secs": 600}
    replicas.refused = "exit code 2: the engine at http://10.0.0.7:30000 serves another model"
    failed = await api.post("/rollout/engines", **body)
    assert failed["engine_urls"] == ["http://10.0.0.7:30000"]
    told = await api.reaches(f"/rollout/scale_out/{failed['request_id']}", "FAILED")
    assert "serves another model" in told["failed_engines"]["rollout-2"]
    replicas.refused = ""
    good = await api.post("/rollout/engines", **body)
    await api.reaches(f"/rollout/scale_out/{good['request_id']}", "ACTIVE")
    engines = await api.get("/rollout/engines")
    assert engines["num_replicas"] == 2, "engines elsewhere are not counted"
    assert [one["engine_url"] for one in engines["engines"]] == ["", "", "http://10.0.0.7:30000"]
    out = await api.post("/rollout/scale_in", engine_urls=body["urls"])
    assert (await api.reaches(f"/rollout/scale_in/{out['request_id']}", "COMPLETED"))["removed_engines"] == [
        "rollout-2"
    ]


async def test_what_is_refused(api: Api, replicas: Replicas):
    assert "exactly one of" in (await api.post("/rollout/scale_out", 400))["detail"]
    assert "exactly one of" in (await api.post("/rollout/scale_in", 400, num_replicas=1, replicas=["a"]))["detail"]
    assert "can be rollouts, not reward" in (await api.post("/reward/engines", 400, urls=["http://a:1"]))["detail"]
    assert "is none of ACTIVE" in (await api.get("/rollout/scale_in?status=LOST", 400))["detail"]
    for body in ({"num_replicas": -1}, {"engine_urls": ["10.0.0.7"]}, {"num_replicas": 1, "model_name": "b"}, {"n": 1}):
        await api.post("/rollout/scale_out", 422, **body)
    await api.post("/rollout/engines", 422, urls=["10.0.0.7"])
    await api.post("/trainer/scale_out", 422, num_replicas=2)


async def test_without_a_launcher_nobody_can_start_anything_and_draining_works_all_the_same(
    api: Api, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
):
    async def none() -> list[wanted.Launcher]:
        return []

    monkeypatch.setattr(api.scaler.ctx.registry, "launchers", none)
    refused = await api.post("/rollout/scale_out", 409, num_replicas=3)
    assert "docker compose up -d --scale" in refused["detail"]
    made = await api.post("/rollout/scale_in", replicas=["rollout-0"])
    await api.reaches(f"/rollout/scale_in/{made['request_id']}", "COMPLETED")


async def test_a_controller_that_was_stopped_and_woken_changes_nothing(api: Api, opener: Callable[..., Any]):
    old = Scaler(await opener())
    one, new = await api.scaler.submit("out", "rollout", "key", target=3, timeout_s=600.0)
    assert new
    await until(lambda: api.scaler.operations[one.id].status == "ACTIVE", "it is done", DEADLINE_S)
    coming = replace(
        one, status="CREATING", began=time.time(), specs={"rollout-9": {"service": "rollout", "by": one.id}}
    )
    old.operations, old._revisions = {one.id: coming}, {one.id: 1}
    with pytest.raises(Conflict):
        await old.tick()
    assert "rollout-9" not in wanted.load(await old.ctx.kv.get(wanted.KEY)).replicas
    old.operations, old._revisions = {one.id: one}, {one.id: 1}
    with pytest.raises(Conflict):
        await old.cancel(one.id)
    with pytest.raises(KeyReused):
        await Scaler(await opener()).submit("in", "rollout", "key", target=3, timeout_s=600.0)
    again, new = await Scaler(await opener()).submit("out", "rollout", "key", target=3, timeout_s=600.0)
    assert not new
    assert isinstance(again, Operation)
    assert again.status == "ACTIVE"
