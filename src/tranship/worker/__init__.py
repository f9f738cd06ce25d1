"""A process that hosts stages: take, work, put. The dock's process loads this package too, so nothing heavy is here."""

from tranship.worker.spec import WEIGHTS, WorkerSpec

__all__ = ["WEIGHTS", "WorkerSpec"]
