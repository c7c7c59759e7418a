"""TensorBoard: event files in `<run>/loggers/tensorboard`."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from areal_async.service.samples import SampleKind
from areal_async.show.loggers import LoggedRun, missing_package
from areal_async.show.loggers.tables import markdown, picture


class TensorBoard:
    """`log_dir` is the parent folder; the event files are in its subfolder with the job's name. By default
    they are in the run's folder."""

    def __init__(self, run: LoggedRun, *, log_dir: str = "") -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.plugins.image.metadata import create_summary_metadata as image_metadata
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._tensor, self._string = tensor_pb2.TensorProto, types_pb2.DT_STRING
        self._text = create_summary_metadata(display_name="", description="")
        self._image = image_metadata(display_name="", description="")
        folder = Path(log_dir).expanduser() / run.job if log_dir else run.folder / "tensorboard"
        self._writer: Any = EventFileWriter(str(folder))

    check_job = staticmethod(partial(missing_package, "tensorboard"))

    def figures(self, steps: int, values: Mapping[str, float]) -> None:
        self._add(
            steps, [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )

    def samples(self, steps: int, kind: SampleKind, samples: Sequence[Mapping[str, Any]]) -> None:
        told = [markdown(sample).encode() for sample in samples]
        values = [self._texts(f"samples/{kind}", self._text, told)]
        if pictures := [one for sample in samples if (one := picture(sample))]:
            files = [io.BytesIO() for _ in pictures]
            for one, file in zip(pictures, files, strict=True):
                one.save(file, "PNG")
            told = [*(str(size).encode() for size in pictures[0].size), *(file.getvalue() for file in files)]
            values.append(self._texts(f"samples/{kind}/images", self._image, told))
        self._add(steps, values)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, ending: str) -> None:
        self._writer.close()

    def _texts(self, tag: str, metadata: Any, texts: Sequence[bytes]) -> Any:
        shape = {"dim": [{"size": len(texts)}]}
        tensor = self._tensor(dtype=self._string, string_val=texts, tensor_shape=shape)
        return self._summary.Value(tag=tag, metadata=metadata, tensor=tensor)

    def _add(self, steps: int, values: list[Any]) -> None:
        self._writer.add_event(
            self._event(wall_time=time.time(), step=steps, summary=self._summary(value=values))
        )
