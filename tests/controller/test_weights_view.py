"""What `slipstream weights` shows, from made-up streams."""

from __future__ import annotations

import json

from services.controller.cli import weights as command
from services.controller.weights_view import Delivery, view
from services.dcs.state import State, Version
from shared.records import Received
from tests.controller.evidence import announcement


def received(version: int, replica: str, how: str = "broadcast", ok: bool = True) -> Received:
    error = "" if ok else "torn"
    return Received(replica, version, version, "d", how, {"transfer": 0.5}, ok, error, 1.0)  # type: ignore[arg-type]


def state() -> State:
    course = Version(2, 2, "d", "update", "p", 0.0, phase="settled", result="ok", seconds={"copy_s": 0.1, "x": 1.0})
    torn = Version(3, 3, "d", "update", "p", 0.0, phase="settled", result="failed", error="reset")
    return State(versions=[course, torn], pins=[1], held={"a": 3, "b": 2})


def test_versions_with_their_holders() -> None:
    answers = [
        received(1, "a", "snapshot"),
        received(2, "a"),
        received(2, "b", ok=False),
        received(2, "b", "delta"),
        received(9, "a"),
    ]
    found = view([announcement(number, number) for number in (1, 2, 3, 3)], answers, state())
    assert [(one.version, one.result, one.pinned) for one in found.versions] == [
        (1, "", True),
        (2, "ok", False),
        (3, "failed: reset", False),
    ]
    assert found.versions[1].publisher == {"copy_s": 0.1}
    assert found.versions[1].replicas == {
        "a": Delivery("broadcast", {"transfer": 0.5}),
        "b": Delivery("delta", {"transfer": 0.5}, tries=2),
    }
    assert found.held == {"a": 3, "b": 2}


def test_it_is_shown_and_is_json(capsys) -> None:
    found = view([announcement(1, 1), announcement(2, 2)], [received(2, "a"), received(2, "b", ok=False)], state())
    command._show(found)
    text = capsys.readouterr().out
    assert "v1 (pinned)  step 1" in text
    assert "a  broadcast  transfer 0.500" in text
    assert "b  failed  torn" in text
    command.print_json(found)
    assert [one["version"] for one in json.loads(capsys.readouterr().out)["versions"]] == [1, 2]
