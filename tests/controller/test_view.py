"""The screen says what the records say, and the lines come once a step."""

import io

import pytest
from rich.console import Console

from services.controller.view import RunView, duration, event_line
from shared.records import Event, Heartbeat, Receipt

from . import evidence as runs


def fed() -> RunView:
    evidence = runs.sound()
    assert evidence.config is not None
    view = RunView(evidence.config)
    for receipt in evidence.receipts:
        view.apply(receipt)
    return view


def drawn(view: RunView, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(view.render(200.0, width))
    return console.file.getvalue()


def test_one_line_an_update_and_never_twice():
    view = fed()
    lines = [line for _, line in view.step_lines()]
    assert len(lines) == runs.STEPS
    assert lines[0].startswith("step 1/4  reward 0.150  age 0/1")
    assert "in flight 0" in lines[0]
    assert "0 s left" in lines[-1]
    assert view.step_lines() == []


def test_an_update_counts_once_all_its_groups_are_told():
    view = fed()
    view.steps = 6
    view.apply(Receipt("issued", "0-10", 10, 8, at=111.0))
    view.apply(runs.trained("0-10", 10, 4, [3, 3]))
    assert view.done == 4
    view.apply(Receipt("issued", "0-11", 11, 9, at=111.0))
    view.apply(runs.trained("0-11", 11, 4, [3, 3]))
    assert view.done == 5


def test_a_rollback_takes_updates_back():
    view = fed()
    view.apply(Receipt("rollback", step=1))
    assert view.done == 1
    assert sorted(view.rewards) == sorted(view.ages) == [0]


def test_the_screen_shows_progress_queues_replicas_and_events():
    view = fed()
    view.depths = {"prompts": 5, "rewards": 0, "advantages": 2}
    view.note([Heartbeat("rollout", "rollout-0", "generating", 7, 3, 2, {}, "here", 1, 0.0, 198.0)])
    view.apply(Event("rollout", "rollout-0", "join", "holds v3", {"version": 3}, 199.0))
    view.apply(runs.metric("trainer", {"loss": 0.125, "busy_s": 3.0}))
    text = drawn(view)
    for part in (
        "step 4/4",
        "reward 0.750",
        "prompts 5",
        "advantages 2",
        "generating",
        "2 s ago",
        "holds v3",
        "loss 0.125",
    ):
        assert part in text
    assert "zero_variance 1" in text


@pytest.mark.parametrize("width", [20, 40, 100, 300])
def test_it_fits_any_terminal(width):
    assert max(map(len, drawn(fed(), width).splitlines())) <= width


def test_the_curve_runs_from_low_to_high():
    curve = fed().curve(80)
    assert len(curve) == runs.STEPS
    assert list(curve) == sorted(curve)
    assert len(fed().curve(2)) == 2


def test_before_the_first_update_the_trainer_says_what_goes_on():
    evidence = runs.sound()
    assert evidence.config is not None
    view = RunView(evidence.config)
    view.note([Heartbeat("trainer", "trainer-0", "warm start", 0, -1, -1, {}, "here", 1, 0.0, 1.0)])
    assert "warm start" in drawn(view)
    assert view.curve(10) == ""


def test_text_of_users_is_never_taken_for_markup():
    view = fed()
    view.apply(Event("reward", "reward-0", "fault", "bad [/tag] in [red]answer", {}, 1.0))
    assert "bad [/tag] in [red]answer" in drawn(view)
    assert "(a=1)" in event_line(Event("reward", "", "fault", "x", {"a": 1}, 1.0))


def test_durations():
    assert [duration(seconds) for seconds in (5.4, 95, 3720)] == ["5 s", "1 min 35 s", "1 h 2 min"]
