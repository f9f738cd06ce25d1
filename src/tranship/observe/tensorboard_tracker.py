"""Metrics as TensorBoard event files, with tensorboard's own writer: neither torch nor TensorFlow is imported."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Message classes are made at run time, where a type checker does not see them.
from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyrefly: ignore[missing-module-attribute]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyrefly: ignore[missing-module-attribute]
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

_FLUSH_S = 1


class TensorBoardTracker:
    """`RUN/tensorboard`. A start-of-session mark tells TensorBoard to forget what stands there for later steps.

    The configuration is shown under TEXT, as JSON.
    """

    def __init__(self, run_dir: Path, resumed_step: int | None, *, project: str, config: Mapping[str, Any]) -> None:
        self._writer = EventFileWriter(str(run_dir / "tensorboard"), flush_secs=_FLUSH_S)
        first_step = 0 if resumed_step is None else resumed_step + 1
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))
        if config:
            # Markdown shows indented lines as they are.
            text = json.dumps(config, indent=2, ensure_ascii=False).replace("\n", "\n    ")
            shown = text_pb("config", f"    {text}")
            self._writer.add_event(Event(wall_time=time.time(), step=first_step, summary=shown))

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric, at `step`; the kind shows in the names (val/...)."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flush, stop the writer's thread and close the file."""
        self._writer.close()
