"""A process that hosts stages: take, work, put."""

from tranship.worker.spec import WorkerSpec
from tranship.worker.worker import Worker

__all__ = ["Worker", "WorkerSpec"]
