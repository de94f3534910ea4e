"""The key-value bucket: compare-and-set, time to live, and repeats over a killed broker."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.broker import EmbeddedBroker
from shared.errors import BucketMissing, Conflict, KeyExists, RequestTimeout
from shared.kv import KV
from tests.shared.guarantees import makes_each_update_once
from tests.shared.runs import until
from tests.stalls import unless_stalled


@pytest.fixture
async def kv(broker: EmbeddedBroker, connect: Any, run_name: str) -> AsyncIterator[KV]:
    opened = await KV.open(await connect(broker.url), f"{run_name}_config", ttl=True)
    yield opened
    opened.close()


async def test_put_get_keys_delete(kv: KV) -> None:
    assert await kv.get("a") is None
    first = await kv.put("a", b"1")
    second = await kv.put("a", b"2")
    assert second > first
    assert await kv.get("a") == (b"2", second)
    await kv.put("b.c", b"")
    assert await kv.get("b.c") == (b"", second + 1)
    assert await kv.keys() == ["a", "b.c"]
    await kv.delete("a")
    await kv.delete("never-was")
    assert await kv.get("a") is None
    assert await kv.keys() == ["b.c"]


async def test_all_values_below_a_prefix_at_once(kv: KV) -> None:
    assert await kv.values("beat") == {}
    many = {f"beat.rollout.r{number}": b"%d" % number for number in range(1100)}  # more than the broker tells at once
    await asyncio.gather(*(kv.put(key, value) for key, value in many.items()))
    await kv.put("beat.rollout.r1", b"newer")
    await kv.put("beaten", b"elsewhere")
    await kv.delete("beat.rollout.r2")
    del many["beat.rollout.r2"]
    assert await kv.values("beat") == many | {"beat.rollout.r1": b"newer"}
    assert await kv.values("beat.rollout") == await kv.values("beat")
    assert await kv.values("beat.roll") == {}


async def test_all_values_are_asked_for_again_when_the_broker_comes_back(
    own_broker: EmbeddedBroker, connect: Any
) -> None:
    kv = await KV.open(await connect(own_broker.url), "r_services", ttl=True)
    await asyncio.gather(*(kv.put(f"beat.a.{number}", b"") for number in range(300)))
    own_broker.kill()
    asking = asyncio.create_task(kv.values("beat"))
    await asyncio.sleep(0)
    own_broker.restart()
    with contextlib.suppress(RequestTimeout):  # a machine so slow that the deadline ran out
        assert len(await asking) == 300

    async def all_there() -> bool:
        with contextlib.suppress(RequestTimeout):
            return len(await kv.values("beat")) == 300
        return False

    await until(all_there, "the broker answers again", 60.0)


async def test_create_only_once(kv: KV) -> None:
    revision = await kv.create("a", b"1")
    with pytest.raises(KeyExists, match="'a' exists in bucket"):
        await kv.create("a", b"2")
    assert await kv.get("a") == (b"1", revision)
    await kv.delete("a")
    assert await kv.create("a", b"3") > revision


async def test_update_needs_the_revision(kv: KV) -> None:
    revision = await kv.create("a", b"1")
    newer = await kv.update("a", b"2", revision)
    with pytest.raises(Conflict, match=f"no longer at revision {revision}"):
        await kv.update("a", b"3", revision)
    with pytest.raises(Conflict):
        await kv.update("other", b"3", newer)
    assert await kv.get("a") == (b"2", newer)


async def test_one_of_many_wins(broker: EmbeddedBroker, connect: Any, kv: KV) -> None:
    rivals = [await KV.open(await connect(broker.url), kv.bucket, ttl=True) for _ in range(4)]
    results = await asyncio.gather(*(rival.create("a", b"x") for rival in rivals), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["KeyExists"] * 3 + ["int"]
    for rival in rivals:
        rival.close()


async def test_time_to_live(kv: KV) -> None:
    asked = time.monotonic()
    await kv.create("a", b"1", ttl_s=1)

    async def gone() -> bool:
        return await kv.get("a") is None

    await until(gone, "the key ran out")
    assert time.monotonic() - asked > 0.8
    assert await kv.keys() == []
    await kv.create("a", b"2")  # no marker is in the way


async def test_each_write_renews_the_time_to_live(broker: EmbeddedBroker, connect: Any, kv: KV) -> None:
    async def keep(number: int) -> None:
        key = f"a{number}"
        revision = await kv.create(key, b"1", ttl_s=1.5)  # rounded up to 2: the broker knows whole seconds
        for _ in range(4):
            await asyncio.sleep(0.7)
            revision = await kv.update(key, b"1", revision, ttl_s=2)
        assert await kv.get(key) == (b"1", revision)

    await unless_stalled(keep, await connect(broker.url), 0.5)


async def test_bucket_that_does_not_exist(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    with pytest.raises(BucketMissing, match=f"{run_name}_config.*check the run's name"):
        await KV.open(await connect(broker.url), f"{run_name}_config", create=False)


@pytest.mark.parametrize("key", ["", ".", "a.", ".a", "a b", "a*", "a>", "ä"])
async def test_keys_that_are_no_subjects(kv: KV, key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        await kv.put(key, b"x")


@pytest.mark.parametrize("first", [True, False], ids=["create", "update"])
async def test_a_write_that_was_stored_without_an_answer_is_known_by_its_id(
    kv: KV, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """It is repeated when the connection was lost meanwhile. The broker looks at the revision before it looks at the id."""
    revision = 0 if first else await kv.create("a", b"1")
    publish = kv._publisher.publish

    async def twice(subject: str, payload: bytes, headers: dict[str, str], deadline_s: float) -> int:
        await publish(subject, payload, headers, deadline_s)
        return await publish(subject, payload, headers, deadline_s)

    monkeypatch.setattr(kv._publisher, "publish", twice)
    written = await (kv.create("a", b"2") if first else kv.update("a", b"2", revision))
    assert await kv.get("a") == (b"2", written)
    assert written > revision


async def test_compare_and_set_over_a_killed_broker(own_broker: EmbeddedBroker, connect: Any) -> None:
    """Each update is done exactly once, though the broker dies between the write and its answer."""
    kv = await KV.open(await connect(own_broker.url), "counter")
    assert await kv.create("n", b"0") == 1

    async def die() -> None:
        await asyncio.to_thread(own_broker.kill)
        await asyncio.to_thread(own_broker.start)

    await makes_each_update_once(kv, die, 3)
    kv.close()
