"""What a run leaves to look at: metrics, events, samples, console, TensorBoard, summary, curve. Knows no dock."""

from tranship.observe.board import check_port
from tranship.observe.curve import draw_curve
from tranship.observe.machine import machine, rss_bytes, versions
from tranship.observe.profile import Profiler
from tranship.observe.record import StepRecord, ValidationRecord, When
from tranship.observe.recorder import Recorder
from tranship.observe.snapshot import snapshots_wanted
from tranship.observe.summary import write_summary
from tranship.observe.trackers import TRACKERS, check_trackers

__all__ = [
    "TRACKERS",
    "Profiler",
    "Recorder",
    "StepRecord",
    "ValidationRecord",
    "When",
    "check_port",
    "check_trackers",
    "draw_curve",
    "machine",
    "rss_bytes",
    "snapshots_wanted",
    "versions",
    "write_summary",
]
