"""The text that Prometheus reads."""

from __future__ import annotations

from services.sinks.follow import Told
from services.sinks.prometheus import FORGET_S, Exposition, described, exposed
from shared.metric_names import DECLARED
from shared.records import Event, Metric
from shared.transfer_queue import StreamDepth


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tell(exposition: Exposition, *records: Metric | Event) -> None:
    exposition.take([Told("metrics", number, record) for number, record in enumerate(records)])


def test_every_declared_metric_has_a_name_of_its_own():
    names = [f"{service}_{exposed(one, service)}" for one in DECLARED for service in one.services]
    assert len(names) == len(set(names))
    assert all(name.endswith("_total") for one in DECLARED if one.kind == "counter" for name in [exposed(one, "x")])


def test_lines():
    exposition = Exposition('a"b')
    tell(
        exposition,
        Metric("trainer", "trainer-0", 3, {"wait_s.groups": 1.5, "loss": float("nan"), "busy_s": 2.0}, 0.0),
        Metric("trainer", "trainer-0", None, {"weights_bytes": 7.0}, 0.0),
        Metric("controller", "c", 3, {"dropped.stale": 1.0, "dropped_total": 1.0}, 0.0),
        Event("rollout", "rollout-0", "joined", "", {}, 0.0),
        Event("rollout", "rollout-1", "joined", "", {}, 0.0),
    )
    exposition.note({"prompts": StreamDepth(5, 100, 3, 2)})
    lines = exposition.render().splitlines()
    assert r'slipstream_trainer_wait_seconds_total{run="a\"b",replica="trainer-0",of="groups"} 1.5' in lines
    assert r'slipstream_trainer_loss{run="a\"b",replica="trainer-0"} NaN' in lines
    assert r'slipstream_trainer_weights_bytes{run="a\"b",replica="trainer-0"} 7.0' in lines
    assert r'slipstream_trainer_step{run="a\"b",replica="trainer-0"} 3.0' in lines
    assert r'slipstream_controller_dropped_by_reason_total{run="a\"b",replica="c",of="stale"} 1.0' in lines
    assert r'slipstream_controller_dropped_total{run="a\"b",replica="c"} 1.0' in lines
    assert r'slipstream_events_total{run="a\"b",service="rollout",kind="joined"} 2.0' in lines
    assert r'slipstream_queue_messages{run="a\"b",stream="prompts"} 5.0' in lines
    assert "# TYPE slipstream_trainer_busy_seconds_total counter" in lines
    assert "# TYPE slipstream_queue_pending gauge" in lines
    assert len([line for line in lines if line.startswith("# TYPE")]) == len(
        {line.split()[2] for line in lines if line.startswith("# TYPE")}
    )


def test_a_replica_that_is_silent_for_long_is_left_out():
    clock = Clock()
    exposition = Exposition("run", clock)
    tell(exposition, Metric("rollout", "old", None, {"running": 1.0}, 0.0))
    clock.now = FORGET_S - 1
    tell(exposition, Metric("rollout", "new", None, {"running": 1.0}, 0.0))
    assert 'slipstream_replicas{run="run",service="rollout"} 2.0' in exposition.render()
    clock.now = FORGET_S + 1
    text = exposition.render()
    assert 'replica="old"' not in text
    assert 'slipstream_replicas{run="run",service="rollout"} 1.0' in text


def test_what_is_not_declared_is_passed_on_as_untyped():
    assert described("rollout", "my.own") == ("slipstream_rollout_my_own", "untyped", "not declared", "")
