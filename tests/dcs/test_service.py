"""The DCS as a service: killed between any two steps, asked twice, asked wrongly, and without a shared disk."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.dcs import snapshots
from services.dcs.client import DcsUnavailable, Refused
from services.dcs.coordinator import Coordinator, SnapshotMissing
from services.dcs.digest import digest
from services.dcs.main import main as dcs_main
from services.dcs.offers import Offer
from services.dcs.snapshots import Manifest, SnapshotError
from services.dcs.state import STATE_KEY, Meeting, State
from services.trainer.weight_copy import Copier, manifest_of
from shared import clock
from shared.broker import EmbeddedBroker
from shared.config import ConfigError
from shared.errors import AlreadyActive, Conflict
from shared.records import Event, Received
from shared.wire import decode
from tests.dcs.conftest import World, stored, weights
from tests.shared.runs import until

MiB = 1 << 20


async def coordinator(world: World) -> Coordinator:
    """A DCS without its HTTP side. Dropping it is killing it: nothing in it runs by itself."""
    ctx = await world.context("dcs", "dcs-0")
    made = Coordinator(ctx.config, ctx.queue, ctx.kv, ctx.registry, ctx.events, "http://127.0.0.1:1")
    await made.restore()
    return made


def snapshot(world: World, version: int, step: int) -> Manifest:
    copy = Copier(MiB).copy(weights(float(step)).items())
    root = world.config.work_path / "snapshots"
    return stored(copy, root, world.model_dir, version=version, step=step)


def digest_of(step: int) -> str:
    return digest(Copier(MiB).copy(weights(float(step)).items()).outline.specs)


async def allocate(dcs: Coordinator, step: int, publisher: str = "p") -> int:
    return (await dcs.allocate(step, digest_of(step), "update", publisher)).version


async def test_killed_between_any_two_steps_it_carries_on(make_world: object) -> None:
    world: World = await make_world()  # type: ignore[operator]
    dcs = await coordinator(world)
    await dcs.join("rollout-a", "a1", 1)
    dcs = await coordinator(world)
    version = await allocate(dcs, 1)
    dcs = await coordinator(world)
    assert await allocate(dcs, 1) == version
    snapshot(world, version, 1)
    dcs = await coordinator(world)
    group = (await dcs.announce(version, "p", 0, [Meeting("127.0.0.1", 7001)])).group
    dcs = await coordinator(world)
    assert (
        await dcs.announce(version, "p", 0, [Meeting("127.0.0.1", 7999)])
    ).group == group  # asked again: the first answer
    dcs = await coordinator(world)
    await dcs.finish(version, "p", True, "", {})
    dcs = await coordinator(world)
    record = Received("rollout-a", version, 1, digest_of(1), "broadcast", {}, True, "", 0.0)
    await world.ctx.queue.publish(world.ctx.subjects.received, record)
    folding = asyncio.create_task(dcs.fold_received())
    await until(lambda: dcs.state.held == {"rollout-a": version}, "the answer is folded")
    folding.cancel()
    dcs = await coordinator(world)
    assert dcs.state.versions[-1].phase == "settled"
    assert await allocate(dcs, 2) == version + 1
    assert [told.version for told in await world.announced()] == [version]


async def test_an_announcement_that_was_stored_is_told_by_the_next_process(make_world: object) -> None:
    world: World = await make_world()  # type: ignore[operator]
    dcs = await coordinator(world)
    version = await allocate(dcs, 1)
    manifest = snapshot(world, version, 1)

    async def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    dcs._publish = killed  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        await dcs.announce(version, "p", 0, [Meeting("127.0.0.1", 7001)])
    assert await world.announced() == []
    await coordinator(world)
    (told,) = await world.announced()
    assert (told.version, told.step, told.digest) == (version, 1, manifest.digest)
    assert told.checksums == [spec.sha256 for spec in manifest.tensors]


async def test_numbers_are_not_used_again_even_if_the_bucket_is_lost(make_world: object) -> None:
    world: World = await make_world()  # type: ignore[operator]
    dcs = await coordinator(world)
    for step in (1, 2):
        version = await allocate(dcs, step)
        snapshot(world, version, step)
        await dcs.announce(version, "p", 0, [Meeting("127.0.0.1", 7001)])
    await world.ctx.kv.delete(STATE_KEY)
    assert await allocate(await coordinator(world), 3) == 3


async def test_a_heartbeat_that_comes_back_costs_no_place_in_the_group(
    make_world: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them run out while the broker or the machine stands still, and are written again a moment later."""
    world: World = await make_world(heartbeat_ttl_s=15.0)  # type: ignore[operator]
    replica = await world.context("rollout", "rollout-a")
    dcs = await coordinator(world)
    await dcs.join("rollout-a", "a1", 1)
    await replica.beat("serving")
    await dcs.tick()
    version = await allocate(dcs, 1)
    snapshot(world, version, 1)

    def pass_by(seconds: float) -> None:
        monkeypatch.setattr(clock, "_OFFSET_S", clock._OFFSET_S + seconds)

    await replica.registry.leave("rollout", "rollout-a")
    pass_by(3600)
    group = (await dcs.announce(version, "p", 0, [Meeting("127.0.0.1", 7001)])).group
    assert group is not None
    assert list(group.ranks()) == ["rollout-a"]
    for _ in range(2):
        pass_by(1)
        await dcs.tick()
    assert [member.replica for member in dcs.state.members] == ["rollout-a"]
    for _ in range(6):  # it does not come back
        pass_by(1)
        await dcs.tick()
    assert dcs.state.members == []


async def test_two_processes_never_hand_out_one_number(make_world: object) -> None:
    world: World = await make_world()  # type: ignore[operator]
    one, two = await coordinator(world), await coordinator(world)
    assert await allocate(one, 1) == 1
    with pytest.raises(Conflict):
        await allocate(two, 2)
    assert await allocate(two, 2) == 2
    with pytest.raises(Conflict):
        await allocate(one, 3)


async def test_without_a_snapshot_nothing_is_announced(make_world: object) -> None:
    world: World = await make_world()  # type: ignore[operator]
    dcs = await coordinator(world)
    version = await allocate(dcs, 1)
    with pytest.raises(SnapshotMissing, match="upload its files first"):
        await dcs.announce(version, "p", 0, [Meeting("127.0.0.1", 7001)])
    snapshot(world, version, 2)  # of other weights
    with pytest.raises(SnapshotMissing):
        await dcs.announce(version, "p", 0, [Meeting("127.0.0.1", 7001)])


async def test_old_snapshots_go_and_the_newest_stay(world: World) -> None:
    publisher = await world.publisher()
    for step in range(5):
        await world.publish(publisher, step)
    await publisher.settled()
    root = world.config.work_path / "snapshots"
    assert snapshots.versions(root) == [3, 4, 5]
    with pytest.raises(Refused, match="HTTP 404"):
        await world.dcs.manifest(1)
    assert (await world.dcs.latest())["version"] == 5


async def test_a_publisher_without_the_dcs_disk_uploads(world: World) -> None:
    publisher = await world.publisher()
    publisher._root = world.folder / "elsewhere"
    version = await world.publish(publisher, 1)
    await publisher.settled()
    folder, manifest = await snapshots.pull(world.dcs, version, world.folder / "cache")
    assert snapshots.problems(folder, manifest) == []
    assert (folder / "tokenizer.json").read_text() == '{"tokenizer": 1}'


async def test_one_dcs_is_active(world: World) -> None:
    with pytest.raises(AlreadyActive, match="dcs-0"):
        await dcs_main(await world.context("dcs", "dcs-1"))


async def test_refusals_tell_what_is_wrong(world: World) -> None:
    with pytest.raises(Refused, match="no version has been announced yet") as refused:
        await world.dcs.latest()
    assert refused.value.status == 404
    with pytest.raises(Refused, match="version 9 is not known: 0 was handed out last"):
        await world.dcs.announce(9, publisher="p", epoch=0, senders=[Meeting("h", 1)])
    with pytest.raises(Refused, match="string_pattern_mismatch") as refused:
        await world.dcs.allocate(publisher="p", step=0, digest="no digest", reason="")
    assert refused.value.status == 422


@pytest.mark.parametrize("path", ["..%2F..%2Fsecret", ".hidden", "%2Fetc%2Fpasswd", "nothing.txt"])
async def test_only_files_of_snapshots_are_served(world: World, path: str) -> None:
    publisher = await world.publisher()
    version = await world.publish(publisher, 0)
    await publisher.settled()
    (world.config.work_path / "secret").write_text("secret")
    url = State.load((await world.ctx.kv.get(STATE_KEY))[0]).url  # type: ignore[index]
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/versions/{version}/files/{path}") as response:
            assert response.status == 404
        async with session.put(f"{url}/versions/{version}/files/.evil", data=b"x") as response:
            assert response.status == 409
        async with session.get(f"{url}/openapi.json") as response:
            assert "/versions/{version}/announce" in (await response.json())["paths"]


async def test_a_download_goes_on_where_it_was(world: World, tmp_path: Path) -> None:
    publisher = await world.publisher()
    version = await world.publish(publisher, 0)
    await publisher.settled()
    entry = next(e for e in (await world.dcs.manifest(version)).files if e.name == "model.safetensors")
    whole = (world.config.work_path / "snapshots" / f"v{version}" / entry.name).read_bytes()
    part = tmp_path / "part"
    part.write_bytes(whole[:1000])
    await world.dcs.download(version, entry.name, part, entry.size)
    assert part.read_bytes() == whole


async def test_versions_go_on_while_the_dcs_is_killed_again_and_again(make_world: object) -> None:
    world: World = await make_world(dcs={"timeout_s": 8.0})  # type: ignore[operator]
    process = await world.dcs_process()
    await world.dcs_answers()
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    replica = await world.replica("rollout-a")
    versions = []
    for step in range(1, 4):
        await asyncio.sleep(0.03 * step)  # somewhere else in the life of a version each time
        process.kill()
        await process.wait()
        with pytest.raises(DcsUnavailable):
            await world.dcs.members()
        publishing = asyncio.create_task(world.publish(publisher, step))
        process = await world.dcs_process()
        versions.append(await publishing)
    await publisher.settled()
    await replica.holds(versions[-1])
    assert versions == sorted(set(versions))
    assert await replica.engine.value() == 3.0
    told = [announcement.version for announcement in await world.announced()]
    assert told == sorted(set(told))
    assert (await world.dcs.version(versions[-1]))["phase"] == "settled"


async def test_weights_go_on_after_the_broker_was_killed(
    own_broker: EmbeddedBroker, run_name: str, tmp_path: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        world = World(own_broker.url, run_name, tmp_path, stack)
        await world.open()
        await world.start_dcs()
        publisher = await world.publisher()
        await world.publish(publisher, 0)
        replica = await world.replica("rollout-a")
        for step in (1, 2):
            publishing = asyncio.create_task(world.publish(publisher, step))
            own_broker.kill()
            own_broker.restart()
            version = await publishing
            await publisher.settled()
            await replica.holds(version)
        assert await replica.engine.value() == 2.0


async def test_each_new_group_is_an_event_with_its_cause(make_world: object) -> None:
    world: World = await make_world()  # type: ignore[operator]
    dcs = await coordinator(world)
    await dcs.join("rollout-a", "a1", 1)

    async def announce(step: int, epoch: int) -> int:
        version = await allocate(dcs, step)
        snapshot(world, version, step)
        known = await dcs.announce(version, "p", epoch, [Meeting("127.0.0.1", 7001)])
        assert known.group is not None
        return known.group.epoch

    epoch = await announce(1, 0)
    await dcs.join("rollout-b", "b1", 1)
    epoch = await announce(2, epoch)
    await dcs.leave("rollout-a", "a1", gone=True)
    await announce(3, epoch)
    ctx = await world.context("reward", "looks")
    told = [decode(data, Event) async for data, _ in ctx.queue.read("events")]
    causes = [event.detail["cause"] for event in told if event.kind == "regrouped"]
    assert causes == ["rollout-a came", "rollout-b came", "rollout-a went"]


async def test_seen_from_outside_it_asks_for_the_token(make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound to every address it tells one that others can use, and whoever has a wrong token hears of it at once."""
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "right")
    world: World = await make_world(dcs={"host": "0.0.0.0"})
    await world.start_dcs()
    assert State.load((await world.ctx.kv.get(STATE_KEY))[0]).url.startswith("http://127.0.0.1:")  # type: ignore[index]
    assert await world.dcs.members() == []
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "wrong")
    with pytest.raises(ConfigError, match=r"GET http://.*/members: .*not the one of this service"):
        await world.dcs.members()
    monkeypatch.delenv("SLIPSTREAM_TOKEN")
    with pytest.raises(ConfigError, match="asks for a token"):
        await world.dcs.allocate(publisher="p", step=0, digest="0" * 64, reason="")


async def test_weights_offered_in_memory_are_told_before_there_is_a_snapshot(make_world: object) -> None:
    """Also by a DCS that was killed between decision and publication: the publisher asks again."""
    world: World = await make_world(placement="colocate")  # type: ignore[operator]
    dcs = await coordinator(world)
    version = await allocate(dcs, 1)
    copy = Copier(MiB).copy(weights(1.0).items())
    manifest = manifest_of([copy.outline], version, 1)
    offer = Offer(asdict(manifest), "here", ["slipstream-a", "slipstream-b"])
    with pytest.raises(SnapshotMissing):
        await dcs.announce(version, "p", 0, [Meeting("127.0.0.1", 7001)])
    for wrong in (
        replace(offer, segments=[]),
        Offer(asdict(manifest_of([copy.outline], version + 1, 1)), "here", offer.segments),
    ):
        with pytest.raises(SnapshotError, match="what is offered is not version"):
            await dcs.announce(version, "p", 0, [Meeting("127.0.0.1", 7001)], wrong)
    dcs._publish = _killed  # type: ignore[method-assign]
    with pytest.raises(ConnectionAbortedError):
        await dcs.announce(version, "p", 0, [Meeting("127.0.0.1", 7001)], offer)
    dcs = await coordinator(world)
    assert await world.announced() == []
    await dcs.announce(version, "p", 0, [Meeting("127.0.0.1", 7001)], offer)
    (told,) = await world.announced()
    assert told.shared == {"host": "here", "segments": ["slipstream-a", "slipstream-b"]}
    assert (told.digest, told.buckets) == (manifest.digest, manifest.buckets)
    assert dcs.latest() is None
    snapshot(world, version, 1)
    latest = dcs.latest()
    assert latest is not None
    assert latest.version == version


async def _killed(*_: object, **__: object) -> None:
    raise ConnectionAbortedError
