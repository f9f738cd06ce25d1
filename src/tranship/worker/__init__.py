"""A process that hosts stages: take, work, put."""

from tranship.worker.spec import WEIGHTS, WorkerSpec
from tranship.worker.worker import Worker

__all__ = ["WEIGHTS", "Worker", "WorkerSpec"]
