"""What people may ask of the DCS: to keep a snapshot, to fetch weights anew, to go back."""

from __future__ import annotations

import pytest

from services.dcs import rollback, snapshots
from services.dcs.client import Refused
from services.dcs.rollback import Wish
from services.dcs.versions import KEPT_VERSIONS
from tests.dcs.conftest import World, weights
from tests.shared.runs import until


async def publish_some(world: World, count: int) -> None:
    publisher = await world.publisher()
    for step in range(count):
        await world.publish(publisher, step)
    await publisher.settled()


async def test_a_pinned_snapshot_is_kept_and_can_be_pulled(world: World) -> None:
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    await world.publish(publisher, 1)
    assert await world.dcs.pin(1) == [1]
    for step in range(2, KEPT_VERSIONS + 3):
        await world.publish(publisher, step)
    await publisher.settled()
    root = world.config.work_path / "snapshots"
    newest = KEPT_VERSIONS + 3
    assert snapshots.versions(root) == [1, newest - 2, newest - 1, newest]
    assert (await world.dcs.version(1))["pinned"]
    folder, manifest = await snapshots.pull(world.dcs, 1, world.folder / "cache")
    assert snapshots.problems(folder, manifest) == []
    with pytest.raises(Refused, match="version 2 has no snapshot any more"):
        await world.dcs.pin(2)
    assert await world.dcs.pin(1, False) == []
    await world.publish(publisher, 99)
    await publisher.settled()
    assert 1 not in snapshots.versions(root)


async def test_a_replica_fetches_its_weights_anew(world: World) -> None:
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    a = await world.replica("rollout-a")
    version = await world.publish(publisher, 1)
    await publisher.settled()
    await a.holds(version)
    assert await world.dcs.resync("rollout-a") == {"version": version, "replicas": ["rollout-a"]}

    async def again() -> bool:
        return [r.how for r in await world.received(version) if r.ok] == ["broadcast", "snapshot"]

    await until(again, "it has fetched them")
    assert a.engine.log.count("disk") == 1
    assert await a.engine.value() == 1.0
    version = await world.publish(publisher, 2)
    await publisher.settled()
    await a.holds(version)
    assert [r.how for r in await world.received(version)] == ["broadcast"]
    with pytest.raises(Refused, match="no replica rollout-z is known"):
        await world.dcs.resync("rollout-z")


async def test_a_wish_to_go_back_is_stored_for_the_trainer(world: World) -> None:
    await publish_some(world, 3)
    assert await world.dcs.roll_back(2) == {"version": 2, "step": 1}
    assert await rollback.asked(world.ctx.kv) == Wish(2, 1)
    with pytest.raises(Refused, match="version 9 was never announced"):
        await world.dcs.roll_back(9)


async def test_a_version_of_a_history_that_was_left_cannot_come_back(world: World) -> None:
    await publish_some(world, 3)
    other = await world.publisher("trainer-1")
    await world.publish(other, 0)
    await world.publish(other, 1, weights(7.0))
    await other.settled()
    with pytest.raises(Refused, match="version 2 belongs to a history that was left: step 1 is version 5 now"):
        await world.dcs.roll_back(2)
    assert (await world.dcs.roll_back(1))["step"] == 0, "the same bytes"
