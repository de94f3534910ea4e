"""The window: issue order with a bounded look ahead, one fate a group, the same after a restart."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.window import Window


def arrive(window: Window[int], *issues: int) -> list[int]:
    for issue in issues:
        window.offer(issue, issue)
    return [issue for issue, _ in window.take()]


def test_a_window_of_one_is_issue_order() -> None:
    window: Window[int] = Window(1)
    assert arrive(window, 2, 1) == []
    assert arrive(window, 0) == [0, 1, 2]
    assert window.head == 3


def test_a_wider_window_passes_what_is_not_finished_but_no_further() -> None:
    window: Window[int] = Window(3)
    assert arrive(window, 1, 2, 3, 4) == [1, 2]
    assert (window.head, window.waiting) == (0, 2)
    assert arrive(window, 0) == [0, 3, 4]


def test_drops_do_not_use_up_the_window() -> None:
    window: Window[int] = Window(2)
    assert arrive(window, 3) == []
    window.drop(1)
    assert arrive(window) == []
    window.drop(2)
    assert arrive(window) == [3]
    assert window.head == 0
    window.drop(0)
    assert window.head == 4


def test_first_fate_stands() -> None:
    window: Window[str] = Window(1)
    assert window.offer(0, "a")
    assert not window.offer(0, "again")
    assert window.take() == [(0, "a")]
    assert not window.offer(0, "redelivered")
    assert window.drop(0) is None
    assert window.offer(1, "b")
    assert window.drop(1) == "b"
    assert window.take() == []
    assert not window.offer(1, "late")
    assert window.resolved(1)


def test_take_keeps_what_is_over_the_limit() -> None:
    window: Window[int] = Window(1)
    for issue in range(5):
        window.offer(issue, issue)
    assert [issue for issue, _ in window.take(3)] == [0, 1, 2]
    assert window.take(0) == []
    assert [issue for issue, _ in window.take(3)] == [3, 4]


def test_what_has_no_place_in_the_order_is_refused() -> None:
    with pytest.raises(ValueError, match="only groups for training"):
        Window[int](1).offer(-1, 0)
    with pytest.raises(ValueError, match="at least 1"):
        Window[int](0)


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 5),
    order=st.permutations(range(14)),
    dropped=st.sets(st.integers(0, 13)),
    restart_at=st.integers(0, 13),
    limit=st.one_of(st.none(), st.integers(1, 3)),
)
def test_order_fate_and_restart(
    size: int, order: list[int], dropped: set[int], restart_at: int, limit: int | None
) -> None:
    """In any order of arrival, with drops and a restart that forgets what was waiting."""
    window: Window[int] = Window(size)
    taken: list[int] = []
    waiting: list[int] = []
    for moment, issue in enumerate(order):
        if moment == restart_at:
            window = Window.restore(window.state())
            for lost in waiting:  # un-acked, so the broker brings it again, along with what was taken
                window.offer(lost, lost)
            assert not any(window.offer(old, old) for old in taken)
        if issue in dropped:
            window.drop(issue)
        else:
            assert window.offer(issue, issue)
            waiting.append(issue)
        now = [found for found, _ in window.take(limit)]
        assert now == sorted(now)
        for found in now:
            waiting.remove(found)
            taken.append(found)
    while rest := [found for found, _ in window.take(limit)]:
        taken += rest
    assert sorted(taken) == [issue for issue in range(14) if issue not in dropped]  # nothing lost, nothing twice
    assert window.head == 14
    for place, issue in enumerate(taken):  # at most size - 1 later groups go before any group
        assert sum(earlier > issue for earlier in taken[:place]) <= size - 1
