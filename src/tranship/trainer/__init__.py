"""The loop and its one coordinator."""

from tranship.trainer.preflight import Report, preflight
from tranship.trainer.result import Result
from tranship.trainer.run import run

__all__ = ["Report", "Result", "preflight", "run"]
