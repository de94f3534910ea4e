"""report.json says what the records say, and is written whole or not at all."""

import json

import pytest

from services.controller import report
from shared.records import Receipt

from . import evidence as runs


def test_the_report_of_a_sound_run():
    built = report.build(runs.sound())
    assert built["reward_by_step"] == [0.15, 0.35, 0.55, 0.75]
    assert built["reward_window"] == 4
    assert (built["reward_first"], built["reward_last"]) == (0.25, 0.45)
    assert (built["staleness_max"], built["staleness_histogram"]) == (1, {"0": 4, "1": 12})
    assert (built["issued"], built["trained"], built["pending"]) == (10, 8, 1)
    assert built["dropped"] == {"zero_variance": 1}
    assert built["balanced"] is True
    assert built["faults"] == []
    assert (built["steps"], built["samples"], built["tokens"], built["tokens_drawn"]) == (4, 16, 48, 48)
    assert built["replicas"] == {
        "rollout-0": {"drawn": 4, "trained": 4, "share": 0.5},
        "rollout-1": {"drawn": 4, "trained": 4, "share": 0.5},
    }
    assert built["versions"][2]["digest"] == "digest-3"
    assert built["versions"][2]["holders"]["rollout-1"] == {
        "how": "broadcast",
        "seconds": {"receive": 0.5, "switch": 0.01},
    }
    assert built["wall_seconds"] == 10.0


def test_reward_is_averaged_over_the_last_updates(monkeypatch):
    monkeypatch.setattr(report, "REWARD_WINDOW", 2)
    built = report.build(runs.sound())
    assert (built["reward_first"], built["reward_last"]) == (0.25, 0.65)


def test_an_update_that_was_rolled_back_does_not_count():
    evidence = runs.sound()
    evidence.receipts.append(Receipt("rollback", step=3))
    for issue in (6, 7):
        again = runs.trained(f"0-{issue}", issue, 3, [2, 2])
        again.reward = 0.0
        evidence.receipts.append(again)
    assert report.build(evidence)["reward_by_step"] == [0.15, 0.35, 0.55, 0.0]


def test_a_group_without_a_score_does_not_spoil_the_mean():
    evidence = runs.sound()
    runs.changed(evidence, "0-0", "trained", reward=float("nan"))
    runs.changed(evidence, "0-2", "trained", reward=None)
    assert report.build(evidence)["reward_by_step"] == [0.2, 0.4, 0.55, 0.75]


def test_evaluation_before_and_after():
    evidence = runs.sound()
    for step, reward in ((0, 0.0), (4, 1.0)):
        for index in range(2):
            receipt = Receipt("evaluated", f"eval-{step}-{index}", step=step, reward=reward - index * 0.5 * reward)
            evidence.receipts += [receipt, receipt]
    evaluation = report.build(evidence)["evaluation"]
    assert (evaluation["before"], evaluation["after"]) == (0.0, 0.75)
    assert evaluation["groups"] == {"0": 2, "4": 2}


def test_cpu_seconds_survive_a_restart_of_the_process():
    counters = report.Counters(
        [
            runs.metric("rollout", {"cpu_s": 4.0, "loss": 3.0}, "a"),
            runs.metric("rollout", {"cpu_s": 9.0}, "a"),
            runs.metric("rollout", {"cpu_s": 1.0}, "a"),  # started again: counts from zero
            runs.metric("rollout", {"cpu_s": 2.5}, "b"),
        ]
    )
    assert counters.by_service("cpu_s") == {"rollout": 12.5}


def test_where_the_trainers_time_went():
    evidence = runs.sound()
    evidence.metrics.append(runs.metric("trainer", {"busy_s": 6.0, "wait_s.groups": 3.0, "wait_s.weights": 1.0}))
    built = report.build(evidence)
    assert built["trainer_busy_share"] == 0.6
    assert built["trainer_idle_share"] == {"groups": 0.3, "weights": 0.1}


def test_turns_on_a_shared_device_are_counted_over_restarts():
    evidence = runs.sound()
    assert "turns" not in report.build(evidence)
    evidence.config.placement = "colocate"
    evidence.metrics += [
        runs.metric("trainer", {"sleeps_total": 3.0, "wakes_total": 2.0, "sleep_s_total": 0.5}),
        runs.metric("rollout", {"sleeps_total": 2.0}, "a"),
        runs.metric("rollout", {"sleeps_total": 1.0}, "a"),  # another engine: counts from zero
        runs.metric("rollout", {"sleeps_total": 4.0, "wake_s_total": 1.0}, "b"),
    ]
    turns = report.build(evidence)["turns"]
    assert turns == {
        "trainer": {"sleeps": 3.0, "wakes": 2.0, "sleep_s": 0.5},
        "rollout": {"sleeps": 7.0, "wake_s": 1.0},
    }


def test_a_run_that_never_started_has_a_report_too():
    evidence = runs.sound()
    evidence.receipts, evidence.drawn, evidence.announced, evidence.received = [], [], [], []
    built = report.build(evidence)
    assert built["reward_first"] is None
    assert built["staleness_max"] is None
    json.dumps(built, allow_nan=False)


def test_writing_replaces_the_whole_file_or_nothing(tmp_path):
    path = tmp_path / "deep" / "report.json"
    report.write(path, {"a": 1})
    with pytest.raises(ValueError):
        report.write(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["report.json"]
