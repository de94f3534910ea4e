"""The sinks that need a package, with the real package: `make test-sinks`."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from services.sinks.follow import Sink, Told
from shared.records import Event, Metric

pytestmark = pytest.mark.sinks


def feed(sink: Sink, kind: str = "joined") -> None:
    now = time.time()
    records: list[Metric | Event] = [
        Metric("trainer", "trainer-0", 1, {"loss": 0.5, "reward": float("nan")}, now),
        Metric("rollout", "rollout-0", None, {"tokens_total": 5.0}, now),
        Event("rollout", "rollout-0", kind, "hello", {}, now),
        Metric("trainer", "trainer-0", 2, {"loss": 0.25}, now),
    ]
    sink.take([Told("metrics", number, record) for number, record in enumerate(records, 1)])
    sink.close()


def test_tensorboard(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from services.sinks.tensorboard import TensorBoard

    feed(TensorBoard(tmp_path))
    written = EventAccumulator(str(tmp_path))
    written.Reload()
    assert [(one.step, one.value) for one in written.Scalars("trainer/loss")] == [(1, 0.5), (2, 0.25)]
    assert [(one.step, one.value) for one in written.Scalars("rollout/tokens_total/rollout-0")] == [(1, 5.0)]
    assert "events/rollout" in written.Tags()["tensors"]


def test_wandb_offline(tmp_path: Path):
    from services.sinks.wandb import WeightsAndBiases

    feed(WeightsAndBiases("demo", {"steps": 2}, tmp_path, "project", offline=True))
    (log,) = tmp_path.glob("wandb/offline-run-*-demo/run-demo.wandb")
    written = log.read_bytes()
    for name in (b"trainer/loss", b"rollout/tokens_total/rollout-0", b"events/rollout/joined", b"0.25"):
        assert name in written


def test_clearml_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path))
    from services.sinks.clearml import ClearMl

    sink = ClearMl("demo", {"steps": 2}, "project", offline=True)
    folder = Path(sink.offline_folder)
    feed(sink)
    written = "".join(file.read_text() for file in folder.glob("metrics.jsonl"))
    assert "tokens_total" in written
    assert "0.25" in written


def test_apprise():
    from services.sinks.apprise import PER_MINUTE, Notifier, Pace

    bodies: list[bytes] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        feed(Notifier("demo", [f"json://127.0.0.1:{server.server_port}/"], since=0.0), kind="run_finished")
        feed(Notifier("demo", [f"json://127.0.0.1:{server.server_port}/"], since=time.time() + 60), kind="run_failed")
    finally:
        server.shutdown()
    assert len(bodies) == 1
    assert b"demo: run_finished (rollout-0)" in bodies[0]
    with pytest.raises(ValueError, match="Apprise does not know"):
        Notifier("demo", ["nonsense://x"])
    pace = Pace(PER_MINUTE)
    assert [pace.allows(0.0) for _ in range(PER_MINUTE + 2)] == [True] * PER_MINUTE + [False] * 2
    assert pace.skipped() == 2
    assert pace.skipped() == 0
    assert pace.allows(61.0)
