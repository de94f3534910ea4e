"""Nobody is judged by time in which the judge did not look."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import awake
from shared.awake import Awake, Missing
from tests.shared.runs import until

HOUR_S = 3600.0
GAPS = st.floats(0.0, 1e6)


@given(st.lists(GAPS), st.floats(0.1, 10.0))
def test_a_pause_adds_no_more_than_the_longest_look(gaps, longest_s):
    counted, now = Awake(longest_s), 1e6
    counted.look(now)
    for gap in gaps:
        before, now = counted.seconds, now + gap
        added = counted.look(now) - before
        assert 0 <= added <= longest_s + 1e-6
        assert gap > longest_s or added == pytest.approx(gap, abs=1e-6)


def test_with_closed_eyes_nothing_passes():
    counted = Awake(5.0)
    counted.look(0.0)
    counted.close_eyes()
    assert counted.look(4.0) == 0.0
    assert counted.look(5.0) == 1.0


@given(st.lists(st.tuples(st.floats(0.01, 30.0), st.sets(st.sampled_from("abc")))))
def test_missing_is_who_was_not_seen_for_the_whole_grace(looks):
    missing, now, seen = Missing(grace_s=5.0, longest_s=2.0), 0.0, dict.fromkeys("abc", 0.0)
    awake_s = 0.0
    for number, (gap, absent) in enumerate(looks):
        now += gap
        awake_s += min(gap, 2.0) if number else 0.0
        gone = missing.look(absent, now)
        for name in "abc":
            if name not in absent:
                assert name not in gone
                seen[name] = awake_s
            elif name in gone:
                assert awake_s - seen[name] >= 5.0 - 1e-6


def test_one_who_stays_away_is_missing_and_one_who_comes_back_begins_anew():
    missing = Missing(grace_s=5.0, longest_s=2.0)
    assert [missing.look({"a"}, now) for now in (0.0, HOUR_S, HOUR_S + 2, HOUR_S + 3)] == [set(), set(), set(), {"a"}]
    assert missing.look(set(), HOUR_S + 4) == set()
    assert [missing.look({"a"}, HOUR_S + now) for now in (5, 7, 9, 10)] == [set(), set(), set(), {"a"}]


class Sleeper:
    """The loop's time, with hours in which the process was not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.slept_s, real = 0.0, loop.time
        monkeypatch.setattr(loop, "time", lambda: real() + self.slept_s)


async def test_the_clock_stands_still_with_its_process(monkeypatch):
    sleeper = Sleeper(monkeypatch)
    with awake.clock() as now:
        began = now()
        for _ in range(3):
            sleeper.slept_s += HOUR_S
            await asyncio.sleep(0.01)
        assert now() - began < HOUR_S
        later = now()
        await until(lambda: now() - later > 2 * awake.LONGEST_S, "it goes on")


async def test_a_timeout_gives_the_time_that_the_process_has(monkeypatch):
    sleeper = Sleeper(monkeypatch)
    answer = asyncio.Event()

    async def wait() -> bool:
        async with awake.timeout(60):
            await answer.wait()
        return True

    waiting = asyncio.create_task(wait())
    for _ in range(3):
        await asyncio.sleep(0.01)
        sleeper.slept_s += HOUR_S
    await asyncio.sleep(0.01)
    answer.set()
    assert await waiting


async def test_a_timeout_ends():
    with pytest.raises(TimeoutError):
        async with awake.timeout(0.3):
            await asyncio.sleep(HOUR_S)
