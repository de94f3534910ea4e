"""The rest of the state table over a real broker: cancelling in each state, and the controller killed right after.

The controller is killed with each request still warm, so that what follows is done by the next one from the record alone.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from shared import wanted
from shared.records import Heartbeat
from tests.controller.test_scaling import DEADLINE_S, Api, Replicas, api, opener, replicas  # noqa: F401
from tests.shared.runs import until

STATES = {"": "CREATING", "starting": "HEALTH_CHECKING", "fetching weights": "WEIGHT_SYNCING"}


class Still:
    """The replicas as they are shown, over and over, with nothing in them that grows: nobody is heard of *again*."""

    def __init__(self, replicas: Replicas, patch: pytest.MonkeyPatch) -> None:  # noqa: F811 - the fixture's name
        self.replicas, self._patch = replicas, patch
        self.beats: list[Heartbeat] = []

    async def show(self, newcomer: str, state: str, version: int) -> None:
        """As now, and this newcomer so."""
        now, kept = time.time(), await self.replicas.ctx.registry.alive()
        self.beats = [replace(beat, at=now) for beat in kept if beat.replica != newcomer]
        self.beats.append(Heartbeat("rollout", newcomer, state, 0, version, 0, {}, "h", 1, now, now))
        self._patch.setattr(self.replicas, "turn", self._turn)

    async def _turn(self) -> None:
        registry = self.replicas.ctx.registry
        await registry.present(wanted.Launcher("test", "local", {}))
        for beat in self.beats:
            await registry.beat(beat)

    async def over(self) -> None:
        """Who was only shown is gone."""
        self._patch.undo()
        for beat in self.beats:
            if beat.service == "rollout" and beat.replica not in self.replicas.started:
                await self.replicas.ctx.registry.leave(beat.service, beat.replica)


async def again(api: Api) -> None:  # noqa: F811
    await api.kill()
    await api.start()


async def record(replicas: Replicas) -> wanted.Wanted:  # noqa: F811
    return wanted.load(await replicas.ctx.kv.get(wanted.KEY))


async def taken_back(api: Api, replicas: Replicas, path: str) -> None:  # noqa: F811
    await api.reaches(path, "CANCELLED")
    await until(lambda: "rollout-2" not in replicas.started, "the newcomer left", DEADLINE_S)

    async def settled() -> bool:
        now = await record(replicas)
        return list(now.replicas) == ["rollout-0", "rollout-1"] and not now.leaving and not now.killed

    await until(settled, "nothing is left of it", DEADLINE_S)


@pytest.mark.parametrize("state", list(STATES))
async def test_out_is_cancelled_and_the_controller_killed(api: Api, replicas: Replicas, state: str):  # noqa: F811
    replicas.up = state
    path = f"/rollout/scale_out/{(await api.post('/rollout/scale_out', num_replicas=3))['request_id']}"
    await api.reaches(path, STATES[state])
    assert (await api.post(f"{path}/cancel", 200))["status"] == "REMOVING"
    await again(api)
    await taken_back(api, replicas, path)


async def test_out_is_cancelled_when_it_is_ready(
    api: Api,  # noqa: F811
    replicas: Replicas,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    still = Still(replicas, monkeypatch)
    replicas.up = "fetching weights"
    path = f"/rollout/scale_out/{(await api.post('/rollout/scale_out', num_replicas=3))['request_id']}"
    await api.reaches(path, "WEIGHT_SYNCING")
    await still.show("rollout-2", "idle", replicas.version)
    await api.reaches(path, "READY")
    assert (await api.post(f"{path}/cancel", 200))["status"] == "REMOVING"
    await again(api)
    await still.over()
    await taken_back(api, replicas, path)


async def test_an_engine_elsewhere_is_cancelled_while_it_is_waited_for(api: Api, replicas: Replicas):  # noqa: F811
    replicas.up = ""
    made = await api.post("/rollout/engines", urls=["http://10.0.0.7:30000"])
    path = f"/rollout/scale_out/{made['request_id']}"
    await api.reaches(path, "CONNECTING")
    await again(api)
    assert (await api.get(path))["status"] == "CONNECTING"
    assert (await api.post(f"{path}/cancel", 200))["status"] == "REMOVING"
    await taken_back(api, replicas, path)


async def test_what_waits_for_its_turn_outlives_the_controller_or_is_cancelled(api: Api, replicas: Replicas):  # noqa: F811
    replicas.up = ""
    paths = []
    for count in (3, 4, 5):
        made = await api.post("/rollout/scale_out", num_replicas=count)
        paths.append(f"/rollout/scale_out/{made['request_id']}")
    await api.reaches(paths[0], "CREATING")
    await again(api)
    assert [(await api.get(path))["status"] for path in paths[1:]] == ["PENDING", "PENDING"]
    assert (await api.post(f"{paths[1]}/cancel", 200))["status"] == "CANCELLED"
    replicas.up = "idle"
    assert (await api.reaches(paths[0], "ACTIVE"))["engine_ids"] == ["rollout-2"]
    assert (await api.reaches(paths[2], "ACTIVE"))["engine_ids"] == ["rollout-3", "rollout-4"]


async def test_in_is_cancelled_while_it_drains_and_the_controller_killed(api: Api, replicas: Replicas):  # noqa: F811
    replicas.stubborn = {"rollout-1"}
    path = f"/rollout/scale_in/{(await api.post('/rollout/scale_in', num_replicas=1, timeout_secs=600))['request_id']}"
    await api.reaches(path, "DRAINING")
    await api.post(f"{path}/cancel", 200)
    await again(api)
    await api.reaches(path, "CANCELLED")
    now = await record(replicas)
    assert list(now.replicas) == ["rollout-0", "rollout-1"]
    assert now.leaving == []


async def test_in_is_not_cancelled_once_it_ends_replicas(api: Api, replicas: Replicas):  # noqa: F811
    replicas.stubborn = {"rollout-1", "for ever"}
    path = f"/rollout/scale_in/{(await api.post('/rollout/scale_in', num_replicas=1, force=True))['request_id']}"
    await api.reaches(path, "REMOVING")
    refused = await api.post(f"{path}/cancel", 409)
    assert "it is ending replicas already" in refused["detail"]
    await again(api)
    replicas.stubborn = set()
    assert (await api.reaches(path, "COMPLETED"))["removed_engines"] == ["rollout-1"]


async def test_a_newcomer_that_stays_under_older_weights_fails(
    api: Api,  # noqa: F811
    replicas: Replicas,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    still = Still(replicas, monkeypatch)
    replicas.up = ""
    body: dict[str, Any] = {"num_replicas": 3, "timeout_secs": 8}
    path = f"/rollout/scale_out/{(await api.post('/rollout/scale_out', **body))['request_id']}"
    await api.reaches(path, "CREATING")
    await still.show("rollout-2", "idle", replicas.version - 1)
    await api.reaches(path, "REMOVING")
    await still.over()
    told = await api.reaches(path, "FAILED")
    assert "holds version 2 of the weights, 3 is needed" in told["failed_engines"]["rollout-2"]
