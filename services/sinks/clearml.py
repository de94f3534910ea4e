"""ClearML: a run's curves, its config, and its events as the task's log. Needs the package clearml.

A sink that is started again goes on with the same task. Offline it writes a folder, which `clearml` imports later.
tests/sinks/test_sinks.py runs it offline.
"""

from __future__ import annotations

from typing import Any

from clearml import Task

from services.sinks.curves import Curves, Point
from services.sinks.follow import Told
from shared.records import Event


class ClearMl:
    """Reports to one task."""

    def __init__(self, run: str, config: dict[str, Any], project: str, offline: bool) -> None:
        if offline:
            Task.set_offline(True)
        self._task = Task.init(
            project_name=project,
            task_name=run,
            reuse_last_task_id=False,
            continue_last_task=False if offline else 0,
            auto_connect_frameworks=False,
            auto_connect_arg_parser=False,
            auto_connect_streams=False,
            auto_resource_monitoring=False,
        )
        self._task.connect(config, name="run file")
        self._logger = self._task.get_logger()
        self._curves = Curves()

    @property
    def offline_folder(self) -> str:
        """Where an offline task writes."""
        return str(self._task.get_offline_mode_folder() or "")

    def take(self, batch: list[Told]) -> None:
        for told in batch:
            if isinstance(told.record, Event):
                event = told.record
                self._logger.report_text(f"{event.replica}: {event.kind}: {event.message}", print_console=False)
            else:
                self._report(self._curves.add(told.record))

    def close(self) -> None:
        self._report(self._curves.flush())
        self._task.close()

    def _report(self, points: list[Point]) -> None:
        for point in points:
            service, _, name = point.name.partition("/")
            title = f"{service}/{name.partition('/')[0]}"
            self._logger.report_scalar(title=title, series=name, value=point.value, iteration=point.step)
