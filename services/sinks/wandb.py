"""Weights & Biases: a run's curves over `step`, its config, and its events as alerts of the run's log. Needs the package wandb.

The W&B run has the Slipstream run's name as its id, so that a sink started again goes on with the same one. Offline it writes
into a folder, which `wandb sync` sends later. tests/sinks/test_sinks.py runs it offline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import wandb

from services.sinks.curves import Curves, Point
from services.sinks.follow import Told
from shared.records import Event


class WeightsAndBiases:
    """Logs into one W&B run."""

    def __init__(self, run: str, config: dict[str, Any], folder: Path, project: str, offline: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            id=run,
            name=run,
            config=config,
            dir=str(folder),
            resume=None if offline else "allow",
            mode="offline" if offline else "online",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # so that a rollback of the step is no error
        self._curves = Curves()

    def take(self, batch: list[Told]) -> None:
        for told in batch:
            if isinstance(told.record, Event):
                self._run.log({"step": self._curves.step, f"events/{told.record.service}/{told.record.kind}": 1})
            else:
                self._log(self._curves.add(told.record))

    def close(self) -> None:
        self._log(self._curves.flush())
        self._run.finish()

    def _log(self, points: list[Point]) -> None:
        by_step: dict[int, dict[str, float]] = {}
        for point in points:
            by_step.setdefault(point.step, {})[point.name] = point.value
        for step, values in by_step.items():
            self._run.log({"step": step, **values})
