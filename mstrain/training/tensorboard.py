"""Scalars and text for TensorBoard: one event file per attempt, framed as TFRecords.

TensorBoard's own writer is not used: its thread ends at the first error, and the next scalar then blocks forever.
"""

import os
import socket
import struct
import time
from pathlib import Path

# Protocol Buffers create these classes at import, which no type checker sees.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.plugins.text.metadata import create_summary_metadata

from mstrain.training import files
from mstrain.training.best_effort import BestEffort

NAME = "tensorboard"


class EventFile:
    """Written through `observers`. TensorBoard discards what earlier attempts logged from step `first` on."""

    def __init__(self, observers: BestEffort, directory: Path, first: int):
        now, host, folder = time.time(), socket.gethostname(), directory / NAME
        path = folder / f"events.out.tfevents.{now:.0f}.{host}.{os.getpid()}.{first}"
        self._file = files.Appender(observers, NAME, path, lambda: files.make_folder(folder))
        version = Event(wall_time=now, file_version="brain.Event:2")
        start = Event(wall_time=now, step=first, session_log=SessionLog(status=SessionLog.START))
        self._file.append(_framed(version), _framed(start))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Returns at once."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._file.append(_framed(Event(wall_time=time.time(), step=step, summary=summary)))

    def text(self, name: str, text: str) -> None:
        """Shows `text` as it is in the Text tab; returns at once."""
        block = "\n".join(f"    {line}" for line in text.splitlines())  # a code block of Markdown
        value = Summary.Value(
            tag=name,
            metadata=create_summary_metadata(name, ""),
            tensor=TensorProto(dtype=DT_STRING, string_val=[block.encode()]),
        )
        self._file.append(_framed(Event(wall_time=time.time(), step=0, summary=Summary(value=[value]))))

    def retry(self) -> None:
        """Tries again to write the events that wait."""
        self._file.append()


def _framed(event: Event) -> bytes:
    """Length, its checksum, the event, its checksum."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
