"""What a process of the run is told at its start: plain values, so that they can travel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tranship.config import Config
from tranship.stages import StageSpec

WEIGHTS = "weights"


@dataclass(frozen=True)
class WorkerSpec:
    """One worker: its stages (by name, in the order in which they are served), and what they are built from.

    table: the whole dataflow. WEIGHTS among the stages: the worker holds the model's weights for others, and trains
    nothing. model_dir: a Hugging Face folder; reward_model_dir: that of the reward model; critic_dir: of the critic, if
    it is not the policy's. probe_ids: token ids on which trainer and sampler compare log-probs after each
    update. max_tokens: longest prompt plus response. eos_token_ids: what ends a response.
    """

    config: Config
    table: tuple[StageSpec, ...]
    stages: tuple[str, ...]
    model_dir: str
    device: str
    num_threads: int
    probe_ids: tuple[int, ...]
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    reward_model_dir: str | None = None
    critic_dir: str | None = None

    def stage(self, name: str) -> StageSpec:
        """A row of the table."""
        return next(row for row in self.table if row.name == name)


def endpoint_file(run_dir: str | Path, process: str) -> Path:
    """Where a process of a run says how clients reach its endpoint."""
    return Path(run_dir) / "serve" / f"{process}.json"
