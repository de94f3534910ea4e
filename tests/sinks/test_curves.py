"""What becomes a point, and where."""

from __future__ import annotations

from services.sinks.curves import Curves, Point
from shared.records import Metric


def metric(service: str, step: int | None, at: float = 0.0, replica: str = "", **values: float) -> Metric:
    return Metric(service, replica or f"{service}-0", step, dict(values), at)


def test_what_has_a_step_stands_at_it_and_the_rest_is_thinned_to_the_newest_before_each_step():
    curves = Curves()
    assert curves.add(metric("trainer", 1, loss=2.0)) == [Point("trainer/loss", 1, 2.0, 0.0)]
    assert curves.add(metric("rollout", None, 1.0, tokens_total=5.0)) == []
    assert curves.add(metric("rollout", None, 2.0, tokens_total=9.0)) == []
    assert curves.add(metric("rollout", None, 2.0, "rollout-1", tokens_total=1.0)) == []
    assert curves.add(metric("controller", 1, reward=0.5)) == [Point("controller/reward", 1, 0.5, 0.0)]
    assert curves.add(metric("trainer", 2, 3.0, loss=1.0)) == [
        Point("rollout/tokens_total/rollout-0", 1, 9.0, 2.0),
        Point("rollout/tokens_total/rollout-1", 1, 1.0, 2.0),
        Point("trainer/loss", 2, 1.0, 3.0),
    ]
    assert curves.flush() == []


def test_what_is_no_number_is_no_point_and_a_rollback_goes_back():
    curves = Curves()
    assert curves.add(metric("trainer", 9, reward=float("nan"), loss=float("inf"))) == []
    assert curves.add(metric("trainer", 4, loss=1.0)) == [Point("trainer/loss", 4, 1.0, 0.0)]
    curves.add(metric("reward", None, scoring=1.0))
    assert curves.flush() == [Point("reward/scoring/reward-0", 4, 1.0, 0.0)]
