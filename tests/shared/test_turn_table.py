"""The table of turns in KV: nobody's change is lost, whoever else changes it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared import permissions
from shared.broker import EmbeddedBroker
from shared.kv import KV
from shared.turn_table import TurnTable
from shared.turns import KEY, Turns


@pytest.fixture
async def kv(broker: EmbeddedBroker, connect: Any, run_name: str) -> AsyncIterator[KV]:
    opened = await KV.open(await connect(broker.url), f"{run_name}_config")
    yield opened
    opened.close()


async def test_changes_at_the_same_time_are_all_there(kv: KV) -> None:
    tables = [TurnTable(kv, asyncio.sleep) for _ in range(5)]
    assert await tables[0].read() == Turns()

    def start(turns: Turns) -> None:
        turns.ask("t", "here")
        turns.give("t", 1)

    await tables[0].change(start)
    entered = await asyncio.gather(
        *(table.change(lambda turns, n=number: turns.enter(f"r{n}", "e", 0.0)) for number, table in enumerate(tables))
    )
    assert entered == [True] * 5
    assert (await tables[3].read()).awake() == [f"r{number}" for number in range(5)]


async def test_what_changes_nothing_writes_nothing(kv: KV) -> None:
    table = TurnTable(kv, asyncio.sleep)
    await table.change(lambda turns: turns.leave("nobody"))
    assert await kv.get(KEY) is None
    await table.change(lambda turns: turns.ask("t", "here"))
    before = await kv.get(KEY)
    await table.change(lambda turns: turns.ask("t", "here"))
    assert await kv.get(KEY) == before


async def test_what_is_refused_is_raised_and_not_stored(kv: KV) -> None:
    table = TurnTable(kv, asyncio.sleep)
    await table.change(lambda turns: turns.ask("t", "here"))
    with pytest.raises(RuntimeError, match="another trainer"):
        await table.change(lambda turns: turns.give("u", 1))
    assert (await table.read()).holder == "trainer"


async def test_a_broker_that_is_away_is_waited_for(broker: EmbeddedBroker, connect: Any, run_name: str) -> None:
    """For as long as whoever waits wants to."""

    class Enough(Exception):
        pass

    async def give_up(_: float) -> None:
        raise Enough

    connection = await connect(broker.url)
    kv = await KV.open(connection, f"{run_name}_config")
    await connection.close()
    with pytest.raises(Enough):
        await TurnTable(kv, give_up).read()
    kv.close()


def test_trainer_and_rollouts_may_write_it_and_nobody_else() -> None:
    for role, allowed in (("trainer", True), ("rollout", True), ("reward", False), ("dcs", False), ("observer", False)):
        assert (f"$KV.run_config.{KEY}" in permissions.of(role, ["run"])["publish"]["allow"]) is allowed
