"""TensorBoard event files of a run's curves; events of the run become text. Needs the package tensorboard, no TensorFlow.

Each start writes a file of its own; TensorBoard shows them as one run. tests/sinks/test_sinks.py reads them back.
"""

from __future__ import annotations

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event as Entry
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from services.sinks.curves import Curves, Point
from services.sinks.follow import Told
from shared.records import Event


class TensorBoard:
    """Writes into `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        self._curves = Curves()

    def take(self, batch: list[Told]) -> None:
        for told in batch:
            if isinstance(told.record, Event):
                self._writer.add_event(self._text(told.record))
            else:
                self._write(self._curves.add(told.record))
        self._writer.flush()

    def close(self) -> None:
        self._write(self._curves.flush())
        self._writer.close()

    def _write(self, points: list[Point]) -> None:
        for point in points:
            summary = Summary(value=[Summary.Value(tag=point.name, simple_value=point.value)])
            self._writer.add_event(Entry(wall_time=point.at, step=point.step, summary=summary))

    def _text(self, event: Event) -> Entry:
        text = f"{event.replica}: **{event.kind}** {event.message}".encode()
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        value = Summary.Value(
            tag=f"events/{event.service}",
            metadata=SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text")),
            tensor=TensorProto(dtype=DT_STRING, string_val=[text], tensor_shape=shape),
        )
        return Entry(wall_time=event.at, step=self._curves.step, summary=Summary(value=[value]))
