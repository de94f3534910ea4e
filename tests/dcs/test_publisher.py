"""The copy of the weights, the snapshot made of it, and what the publisher does when things are not there."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.dcs import snapshots
from services.dcs.client import DcsUnavailable
from services.dcs.digest import checksum, digest
from services.trainer import snapshot_files
from services.trainer.tensorfile import DiskFullError
from services.trainer.weight_copy import Copier
from shared.records import Metric
from shared.wire import decode
from tests.dcs.conftest import World, stored, weights
from tests.shared.runs import until

KIB = 1 << 10


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "README.md"):
        (folder / name).write_text(f"the model's {name}")
    return folder


def test_buckets_hold_every_byte_once_and_aligned() -> None:
    tensors = weights(1.5) | {"empty": torch.zeros(0, 3), "last": torch.arange(7, dtype=torch.bfloat16)}
    copy = Copier(4 * KIB).copy(tensors.items())
    assert sorted(index for bucket in copy.buckets for index in bucket.indices) == list(range(len(tensors)))
    for bucket in copy.buckets:
        offset = 0
        for index in bucket.indices:
            spec = copy.outline.specs[index]
            part = bucket.data[offset : offset + spec.nbytes]
            assert offset % bucket.dtype.itemsize == 0
            assert torch.equal(part.view(bucket.dtype).view(spec.shape), tensors[spec.name])
            assert checksum(part.numpy()) == spec.sha256
            offset += spec.nbytes
        assert offset == bucket.used
    assert sum(copy.outline.nbytes) == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def test_a_copy_does_not_change_with_the_model() -> None:
    tensors = weights(1.0)
    copy = Copier(1 << 20).copy((name, tensor.t() if tensor.dim() == 2 else tensor) for name, tensor in tensors.items())
    before = digest(copy.outline.specs)
    for tensor in tensors.values():
        tensor.add_(1)
    assert digest(copy.outline.specs) == before
    assert [checksum(b.data.numpy()) for b in copy.buckets] == [checksum(b.data.clone().numpy()) for b in copy.buckets]


def test_buffers_are_used_again() -> None:
    copier = Copier(4 * KIB)
    first = {bucket.buffer.data_ptr() for bucket in copier.copy(weights(1.0).items()).buckets}
    second = copier.copy(weights(2.0).items())
    assert {bucket.buffer.data_ptr() for bucket in second.buckets} == first
    assert second.outline.specs == Copier(1 << 20).copy(weights(2.0).items()).outline.specs


def test_the_snapshot_is_a_model_folder(tmp_path: Path, model_dir: Path) -> None:
    copy = Copier(4 * KIB).copy(weights(1.0).items())
    manifest = stored(copy, tmp_path, model_dir, version=3, step=2)
    folder = snapshots.folder(tmp_path, 3)
    assert sorted(entry.name for entry in manifest.files) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert snapshots.problems(folder, manifest) == []
    loaded = load_file(folder / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(1.0).items())


def test_large_snapshots_come_in_shards(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_files, "SHARD_BYTES", 30 * KIB)
    copy = Copier(4 * KIB).copy(weights(1.0).items())
    manifest = stored(copy, tmp_path, model_dir, version=1, step=0)
    folder = snapshots.folder(tmp_path, 1)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(copy.outline.nbytes)
    assert len(set(index["weight_map"].values())) > 1
    for name, tensor in weights(1.0).items():
        assert torch.equal(load_file(folder / index["weight_map"][name])[name], tensor)
    assert snapshots.problems(folder, manifest) == []


async def test_without_members_a_version_is_a_snapshot(world: World) -> None:
    publisher = await world.publisher()
    assert await world.publish(publisher, 0) == 1
    await publisher.settled()
    (told,) = await world.announced()
    assert (told.version, told.step, told.group, told.reason) == (1, 0, None, "update")
    assert told.snapshot.endswith("/versions/1/files")
    assert (await world.dcs.version(1))["phase"] == "settled"


async def test_a_full_disk_stops_the_trainer_with_its_name(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise DiskFullError(errno.ENOSPC, "no room to write")

    monkeypatch.setattr("services.trainer.sender.write_shards", full)
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    with pytest.raises(DiskFullError, match="no room"):
        await world.publish(publisher, 1)


async def test_a_dcs_that_is_not_there_yet_is_waited_for(make_world: object) -> None:
    world: World = await make_world()  # type: ignore[operator]
    publisher = await world.publisher()
    publishing = asyncio.create_task(world.publish(publisher, 0))

    async def beats() -> bool:
        return any(beat.state == "waiting for the DCS" for beat in await world.ctx.registry.alive("trainer"))

    await until(beats, "the trainer says what it waits for")
    await world.start_dcs()
    assert await publishing == 1
    await publisher.settled()


async def test_training_goes_on_while_the_dcs_is_away(make_world: object) -> None:
    world: World = await make_world()  # type: ignore[operator]
    publisher = await world.publisher()
    await asyncio.wait_for(publisher.hand_over(0, weights(0.0).items(), "start"), 60.0)
    await world.start_dcs()
    assert await publisher.numbered() == 1
    await publisher.settled()


async def test_while_the_answers_come_in_the_next_weights_are_copied_but_no_more(world: World) -> None:
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    await publisher.settled()
    replica = await world.replica("rollout-a")
    verified, checksums = asyncio.Event(), replica.engine.checksums

    async def slow() -> object:
        await verified.wait()
        return await checksums()

    replica.engine.checksums = slow
    first = await world.publish(publisher, 1)
    await asyncio.wait_for(publisher.hand_over(2, weights(2.0).items(), "update"), 60.0)
    third = asyncio.create_task(publisher.hand_over(3, weights(3.0).items(), "update"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(third), 0.5)
    verified.set()
    await third
    await publisher.settled()
    await replica.holds(first + 2)
    assert await replica.engine.value() == 3.0
    assert [told.step for told in await world.announced()] == [0, 1, 2, 3]


async def test_told_to_stop_it_does_not_wait_for_ever(make_world: object) -> None:
    world: World = await make_world()  # type: ignore[operator]
    publisher = await world.publisher()
    publisher._ctx.stopping.set()
    with pytest.raises(DcsUnavailable, match="no DCS has started yet"):
        await world.publish(publisher, 0)


async def test_metrics_tell_where_the_time_went(world: World) -> None:
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    await publisher.settled()
    await world.replica("rollout-a")
    version = await world.publish(publisher, 1)
    await publisher.settled()

    async def told() -> dict[str, float]:
        subject = world.ctx.subjects.metrics("trainer", "trainer-0")
        found = [decode(data, Metric) async for data, _ in world.ctx.queue.read("metrics", subject=subject)]
        return next((metric.values for metric in found if metric.values.get("weights_version") == version), {})

    await until(told, "the metrics are there")
    assert set(await told()) >= {
        "weights_bytes",
        "copy_s",
        "checksum_s",
        "snapshot_s",
        "join_s",
        "broadcast_s",
        "settle_s",
    }
    (record,) = await world.received(version)
    assert set(record.seconds) == {"notice", "join", "transfer", "verify", "switch", "total"}
