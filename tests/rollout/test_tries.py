"""Buried is only what failed alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.rollout.tries import ENOUGH, Tries
from shared.broker import EmbeddedBroker
from shared.jetstream import Connection
from shared.kv import KV


@dataclass
class Delivery:
    """What is looked at of one."""

    msg_id: str
    delivered: int


async def test_only_a_group_that_failed_alone_is_buried(
    broker: EmbeddedBroker, connect: Callable[..., Awaitable[Connection]], run_name: str
) -> None:
    kv = await KV.open(await connect(broker.url), run_name)
    tries, others = Tries(kv, 5), Tries(kv, 5)

    async def verdict(group_id: str, delivered: int) -> str:
        return await others.verdict(Delivery(group_id, delivered))  # type: ignore[arg-type]

    assert await verdict("0-1", 6) == "", "it was only there when something died"
    for _ in range(ENOUGH):
        await tries.begin("0-1")
    assert await verdict("0-1", 5) == ""
    assert "delivered 6 times, at most 5 are allowed; 2 times it was drawn alone" in await verdict("0-1", 6)
    assert await verdict("0-2.1", 6) == ""
    await tries.begin("0-2.1")
    await tries.came_through("0-2.1")
    await tries.begin("0-2.1")
    assert await verdict("0-2.1", 6) == "", "what came through begins anew"
