"""The autoscaler's policy: when it acts, and what it never does."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from services.controller.scaling.autoscaler import Decision, Load, Memory, decide
from shared.sections import AutoscaleConfig

RULES = AutoscaleConfig(min_replicas=1, max_replicas=6)
FINE = Load(at=0.0, replicas=3, waiting=0, idle=0.1, busy=0.7, slack=0.5, slots=32)
SHORT = replace(FINE, idle=0.5, busy=1.0, waiting=4)
AMPLE = replace(FINE, idle=0.0, busy=0.3)


def watch(
    load: Load, seconds: float, memory: Memory | None = None, rules: AutoscaleConfig = RULES
) -> tuple[list, Memory]:
    """The same look every `every_s`: what is decided, and when."""
    memory, found, at = memory or Memory(), [], load.at
    while at <= load.at + seconds:
        decision, memory = decide(replace(load, at=at), rules, memory)
        if decision.target is not None:
            found.append((at - load.at, decision.target))
        at += rules.every_s
    return found, memory


def test_more_are_started_once_it_has_held_and_then_not_within_the_pause():
    found, memory = watch(SHORT, 85.0)
    assert found == [(30.0, 6)], "half of the time idle: twice as many"
    found, _ = watch(replace(SHORT, at=90.0), 60.0, memory)
    assert found[0] == (0.0, 6), "after the pause, if nothing came of it"


def test_one_leaves_once_it_has_held_for_long():
    assert watch(AMPLE, 299.0)[0] == [(120.0, 2)]
    assert watch(replace(FINE, idle=0.0, slack=0.05), 299.0)[0] == [(120.0, 2)], "samples wait for the trainer"


def test_nothing_is_done_where_a_newcomer_would_find_no_work():
    assert watch(replace(SHORT, busy=0.4, waiting=0), 300.0)[0] == []
    assert watch(replace(SHORT, slots=3), 300.0)[0] == []


def test_none_leaves_if_the_others_would_be_full():
    assert watch(replace(AMPLE, replicas=2, busy=0.49), 299.0)[0] == []
    assert watch(replace(AMPLE, replicas=1), 299.0)[0] == []


def test_a_gap_an_operation_or_what_is_not_known_begins_the_holding_anew():
    for gap in (replace(SHORT, idle=None), replace(SHORT, operating=True), FINE):
        _, memory = watch(SHORT, 25.0)
        _, memory = decide(replace(gap, at=30.0), RULES, memory)
        assert memory.out_since is None
    _, memory = watch(SHORT, 25.0)
    decision, memory = decide(replace(SHORT, at=90.0), RULES, memory)
    assert decision == Decision(None, "the last look is too old")


def test_the_bounds_are_kept_at_once():
    assert decide(replace(FINE, replicas=9), RULES, Memory())[0].target == 6
    assert decide(replace(FINE, replicas=0), RULES, Memory())[0].target == 1


shares = st.one_of(st.none(), st.floats(0, 1))
looks = st.lists(
    st.builds(
        Load,
        at=st.floats(0.0, 20.0),
        replicas=st.just(0),
        waiting=st.one_of(st.none(), st.integers(0, 50)),
        idle=shares,
        busy=shares,
        slack=st.one_of(st.none(), st.floats(-1, 4)),
        slots=st.integers(1, 64),
        operating=st.booleans(),
    ),
    max_size=60,
)


@given(looks, st.integers(0, 10), st.integers(1, 4), st.integers(0, 6))
def test_whatever_it_sees(plan: list[Load], replicas: int, least: int, more: int):
    rules = AutoscaleConfig(min_replicas=least, max_replicas=least + more, hold_out_s=5, hold_in_s=10, pause_in_s=20)
    dry = rules.model_copy(update={"mode": "dry_run"})
    memory, now, acted = Memory(), 0.0, float("-inf")
    for look in plan:
        now += look.at  # a step in time
        load = replace(look, at=now, replicas=replicas)
        decision, after = decide(load, rules, memory)
        assert decide(load, dry, memory) == (decision, after)
        memory = after
        if decision.target is None:
            continue
        assert load.known
        assert not load.operating
        assert least <= decision.target <= least + more
        assert decision.target != replicas
        inside = least <= replicas <= least + more
        if inside and decision.target > replicas:
            assert now - acted >= rules.pause_out_s
            assert decision.target - replicas <= rules.most_at_once
            assert decision.target <= max(load.slots, 1)
        elif inside:
            assert now - acted >= rules.pause_in_s
            assert decision.target == replicas - 1
        replicas, acted = decision.target, now
