"""Pulling through an object store: rclone's S3 server, a real one, on the disk of this test."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.dcs import pulling, snapshots
from services.dcs.mirror import Mirror
from shared.config import ConfigError
from shared.sections import DcsConfig
from tests.dcs.conftest import World
from tests.dcs.test_deltas import moved, policy
from tests.shared.runs import until

KEY, SECRET = "slipstream-test", "0123456789abcdef0123"
STARTED = re.compile(r"server on \[(http://127\.0\.0\.1:\d+)/\]")


@dataclass
class S3:
    folder: Path
    url: str
    process: asyncio.subprocess.Process

    def objects(self, run: str) -> dict[str, Path]:
        folder = self.folder / "weights" / "some" / "prefix" / run
        return {path.name: path for path in folder.iterdir()} if folder.is_dir() else {}

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@pytest.fixture
async def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[S3]:
    """An empty bucket `weights`."""
    folder = tmp_path / "s3"
    (folder / "weights").mkdir(parents=True)
    command = [str(Path(sys.executable).parent / "rclone"), "serve", "s3", "--config", "/dev/null"]
    process = await asyncio.create_subprocess_exec(
        *command, "--auth-key", f"{KEY},{SECRET}", "--addr", "127.0.0.1:0", str(folder), stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    said = ""
    while not (found := STARTED.search(said)):
        line = await asyncio.wait_for(process.stderr.readline(), 60)
        assert line, said
        said += line.decode()
    for name, value in {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": found[1],
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    server = S3(folder, found[1], process)
    yield server
    await server.kill()


@pytest.fixture
async def world(make_world: Callable[..., Any], s3: S3) -> World:
    """Versions 1 to 3 in the store, with the deltas between them."""
    made: World = await make_world(dcs={"keep_deltas": 8, "store": "s3://weights/some/prefix"})
    await made.start_dcs()
    publisher, weights = await made.publisher(), policy()
    for step in range(3):
        await made.publish(publisher, step, weights)
        weights = moved(weights)
    await publisher.settled()
    await until(lambda: len(s3.objects(made.config.run)) == len(expected(made)) > 5, "all is copied", 60)
    return made


def root(world: World) -> Path:
    return world.config.work_path / "snapshots"


def expected(world: World) -> set[str]:
    """What the files of versions and deltas hold; the deltas are made a little later than the versions."""
    folders = [*root(world).glob("v*"), *(root(world) / "deltas").glob("v*")]
    files = {
        path for folder in folders for path in folder.iterdir() if path.name not in ("snapshot.json", "delta.json")
    }
    return {snapshots.hash_file(path)[1] for path in files}


def lose(world: World, version: int) -> Path:
    """The DCS cannot send the weights of a version any more; returns what it held."""
    path = snapshots.folder(root(world), version) / "model.safetensors"
    kept = path.with_name(".kept")
    path.rename(kept)
    return kept


async def pull(world: World, version: int, cache: str) -> pulling.Pulled:
    pulled = await pulling.pull(world.dcs, version, world.folder / cache)
    assert snapshots.problems(pulled.folder, pulled.manifest) == []
    return pulled


async def test_snapshots_and_deltas_come_from_the_store(world: World, s3: S3) -> None:
    assert s3.objects(world.config.run).keys() == expected(world)
    lose(world, 1)
    assert (await pull(world, 1, "cache")).how == "snapshot"
    for path in (root(world) / "deltas").glob("v*/model.safetensors"):
        path.unlink()
    assert (await pull(world, 3, "cache")).how == "delta"


async def test_the_rest_of_an_interrupted_file_is_asked_for(world: World) -> None:
    kept = lose(world, 2).read_bytes()
    manifest = await world.dcs.manifest(2)
    part = snapshots.receiving(world.folder / "cache", manifest)
    (part / "model.safetensors").write_bytes(kept[: len(kept) // 2])
    assert (await pull(world, 2, "cache")).how == "snapshot"


@pytest.mark.parametrize("fault", ["damaged", "lost", "away"])
async def test_a_store_that_fails_is_passed_by(world: World, s3: S3, fault: str) -> None:
    entry = next(entry for entry in (await world.dcs.manifest(3)).files if entry.name == "model.safetensors")
    stored = s3.objects(world.config.run)[entry.sha256]
    if fault == "damaged":
        stored.write_bytes(bytes(entry.size))
    elif fault == "lost":
        stored.unlink()
    else:
        await s3.kill()
    assert (await pull(world, 3, "cache")).how == "snapshot"


async def test_what_is_no_longer_kept_goes_from_the_store_too(world: World, s3: S3) -> None:
    (old,) = {entry.sha256 for entry in (await world.dcs.manifest(1)).files if entry.name == "model.safetensors"}
    publisher = await world.publisher("trainer-1")
    await world.publish(publisher, 3, moved(policy()))
    await publisher.settled()

    def follows() -> bool:
        objects = s3.objects(world.config.run).keys()
        return old not in objects and objects == expected(world)

    await until(follows, "the store holds what the DCS keeps", 60)


async def test_an_outage_is_told_once_and_made_good(make_world: Callable[..., Any], s3: S3, monkeypatch: Any) -> None:
    monkeypatch.setattr("services.dcs.mirror.RETRY_S", 0.1)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    world: World = await make_world(dcs={"store": "s3://weights/some/prefix"})
    await world.start_dcs()
    publisher = await world.publisher()
    await world.publish(publisher, 0)
    await publisher.settled()

    async def told() -> list[str]:
        return [event.message for event in await world.events() if event.kind == "store_failed"]

    await until(told, "the outage is told", 60)
    assert (await pull(world, 1, "cache")).how == "snapshot"
    (message,) = await told()
    assert "the DCS sends the files itself" in message
    assert s3.objects(world.config.run) == {}


def test_wrong_addresses_and_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError):
        DcsConfig(store="ftp://somewhere")
    events: Any = None
    with pytest.raises(ConfigError, match=r"dcs.store: az://container: "):
        Mirror.open("az://container", tmp_path, "run", events)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ConfigError, match=r"dcs.store: .*slipstream-rl\[store\]"):
        Mirror.open("s3://weights", tmp_path, "run", events)
