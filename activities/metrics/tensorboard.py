"""Metrics of a step as TensorBoard scalars, in `<output_dir>/<run_id>/tensorboard`, without torch or TensorFlow.

A step that is written again replaces what was written from that step on, so that a repeated activity is harmless.
"""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

_FORMAT = "brain.Event:2"
_event: Any = event_pb2  # Generated modules, whose classes a type checker cannot see.
_summary: Any = summary_pb2


@dataclass
class _EventFile:
    path: Path
    stream: BinaryIO
    last_step: int

    def write(self, event: Any) -> None:
        RecordWriter(self.stream).write(event.SerializeToString())


class StepMetricsWriter:
    """Appends to one event file of each run; another one is begun after a restart, or when another worker began one."""

    def __init__(self, output_dir: Path) -> None:
        self._output_dir = output_dir
        self._files: dict[str, _EventFile] = {}

    def folder(self, run_id: str) -> Path:
        """The TensorBoard log folder of a run."""
        return self._output_dir / run_id / "tensorboard"

    def write_step(self, run_id: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step and flush them."""
        file = self._current_file(run_id)
        if step <= file.last_step:
            start = _event.SessionLog(
                status=_event.SessionLog.START
            )  # TensorBoard drops what it read at this step and later.
            file.write(_event.Event(wall_time=time.time(), step=step, session_log=start))
        values = [
            _summary.Summary.Value(tag=name, simple_value=float(value)) for name, value in sorted(metrics.items())
        ]
        file.write(_event.Event(wall_time=time.time(), step=step, summary=_summary.Summary(value=values)))
        file.stream.flush()
        file.last_step = step

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.stream.close()
        self._files.clear()

    def _current_file(self, run_id: str) -> _EventFile:
        """The file to append to: TensorBoard reads files in the order of their names and never goes back."""
        folder = self.folder(run_id)
        folder.mkdir(parents=True, exist_ok=True)
        file = self._files.get(run_id)
        if file is not None:
            if file.path == max(folder.glob("events.out.tfevents.*"), default=None):
                return file
            file.stream.close()
        path = folder / f"events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        file = self._files[run_id] = _EventFile(path, path.open("xb"), last_step=2**62)
        file.write(_event.Event(wall_time=time.time(), file_version=_FORMAT))
        return file
