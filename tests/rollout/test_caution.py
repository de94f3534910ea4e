"""Groups beside each other after an engine's death, and suspects alone."""

from __future__ import annotations

import asyncio

from services.rollout import caution
from services.rollout.caution import Caution


class Slots:
    """Groups that run until the test lets them go."""

    def __init__(self, places: Caution) -> None:
        self.places, self.running, self.most = places, {}, 0
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, delivered: int = 1) -> None:
        self.tasks.append(asyncio.create_task(self._run(name, delivered)))

    async def _run(self, name: str, delivered: int) -> None:
        async with self.places.place() as place:
            await place.taken(delivered)
            self.running[name] = asyncio.Event()
            self.most = max(self.most, len(self.running))
            await self.running[name].wait()
            await self.places.trust(came_through=True)
            del self.running[name]

    async def settled(self) -> set[str]:
        for _ in range(20):
            await asyncio.sleep(0)
        return set(self.running)

    async def finish(self, name: str) -> set[str]:
        self.running[name].set()
        return await self.settled()


async def test_at_first_all_places_are_free():
    slots = Slots(Caution(4, 5))
    for number in range(6):
        slots.start(str(number))
    assert await slots.settled() == {"0", "1", "2", "3"}
    assert await slots.finish("1") == {"0", "2", "3", "4"}


async def test_after_a_death_one_runs_alone_and_each_that_comes_through_doubles():
    places = Caution(4, 5)
    places.engine_died()
    slots = Slots(places)
    for number in range(8):
        slots.start(str(number))
    assert await slots.settled() == {"0"}
    assert await slots.finish("0") == {"1", "2"}
    assert await slots.finish("1") == {"2", "3", "4", "5"}
    assert await slots.finish("2") == {"3", "4", "5", "6"}


async def test_long_groups_earn_trust_by_time(monkeypatch):
    monkeypatch.setattr(caution, "RAMP_S", 0.0)
    places = Caution(4, 5)
    places.engine_died()
    slots = Slots(places)
    for number in range(4):
        slots.start(str(number))
    assert await slots.settled() == {"0"}
    await places.trust()
    assert await slots.settled() == {"0", "1"}


async def test_a_suspect_waits_for_the_others_and_then_runs_alone():
    slots = Slots(Caution(4, 5))
    slots.start("a")
    slots.start("b")
    await slots.settled()
    slots.start("suspect", delivered=4)
    slots.start("also suspect", delivered=5)
    await slots.settled()
    slots.start("late")
    assert await slots.settled() == {"a", "b"}, "who comes later waits for the suspect"
    assert await slots.finish("a") == {"b"}
    assert await slots.finish("b") == {"suspect"}
    assert await slots.finish("suspect") == {"also suspect"}
    assert await slots.finish("also suspect") == {"late"}
    await slots.finish("late")
    await asyncio.wait_for(asyncio.gather(*slots.tasks), 60)
    assert slots.places.held == 0


async def test_what_waits_for_weights_is_in_nobodys_way():
    """A suspect may wait for weights that need another group to be drawn first, and another group for those of a suspect."""
    places, weights, log = Caution(1, 5), {1: asyncio.Event(), 2: asyncio.Event()}, list[str]()

    async def draw(name: str, delivered: int, needs: int, gives: int) -> None:
        async with places.place() as place:
            await place.taken(delivered)
            if needs:
                async with place.resting():
                    await weights[needs].wait()
            log.append(name)
            if gives:
                weights[gives].set()

    work = [draw("late", 1, 2, 0), draw("suspect", 4, 1, 2), draw("early", 1, 0, 1)]
    await asyncio.wait_for(asyncio.gather(*work), 60)
    assert log == ["early", "suspect", "late"]
    assert (places.held, places.suspects, places.alone) == (0, 0, False)


async def test_who_comes_back_from_a_rest_goes_before_who_asks_for_a_prompt():
    """With one place and many slots, each of which holds it while it asks, a group in hand would wait for all of them."""
    places, weights, log = Caution(1, 5), asyncio.Event(), list[str]()

    async def ask(name: str) -> None:
        async with places.place():
            await weights.wait()
            await asyncio.sleep(0.01)
            log.append(name)

    async def draw() -> None:
        async with places.place() as place:
            async with place.resting():
                await weights.wait()
            log.append("drawn")

    work = [asyncio.create_task(draw())]
    for number in range(4):
        work.append(asyncio.create_task(ask(str(number))))
    for _ in range(20):
        await asyncio.sleep(0)
    assert places.held == 1
    weights.set()
    await asyncio.wait_for(asyncio.gather(*work), 60)
    assert log[:2] == ["0", "drawn"], "it comes next"
    assert (places.held, places.suspects, places.returning) == (0, 0, 0)


async def test_a_suspect_that_is_cancelled_leaves_the_places_usable():
    slots = Slots(Caution(2, 5))
    slots.start("a")
    slots.start("suspect", delivered=4)
    await slots.settled()
    slots.tasks[1].cancel()
    await slots.finish("a")
    slots.start("b")
    slots.start("c")
    assert await slots.settled() == {"b", "c"}


async def test_beside_a_suspect_no_other_prompt_is_asked_for():
    """One that only waited would be counted on with it."""
    places = Caution(4, 5)
    places.engine_died()
    slots = Slots(places)
    slots.start("suspect", delivered=4)
    slots.start("also suspect", delivered=4)
    assert await slots.settled() == {"suspect"}
    assert (places.held, places.suspects, places.alone) == (0, 1, True), "the second is not even asked for"
    assert await slots.finish("suspect") == {"also suspect"}


def test_the_last_three_deliveries_are_run_alone_but_never_the_first():
    assert [Caution(4, most).suspect for most in (1, 2, 3, 5, 10)] == [2, 2, 2, 3, 8]
