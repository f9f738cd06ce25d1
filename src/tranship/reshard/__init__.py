"""Weights from the training layout to the inference layout: plan, move, verify. Knows no engine by name."""

from tranship.reshard.execute import digest
from tranship.reshard.plan import Bucket, Move, Plan, make_plan
from tranship.reshard.update import Announcement, WeightSink, WeightSource, check_landed
from tranship.reshard.verify import Arrival, Manifest, ProbeGap, check_probe

__all__ = [
    "Announcement",
    "Arrival",
    "Bucket",
    "Manifest",
    "Move",
    "Plan",
    "ProbeGap",
    "WeightSink",
    "WeightSource",
    "check_landed",
    "check_probe",
    "digest",
    "make_plan",
]
