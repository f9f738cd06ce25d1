"""The sides of `bench e2e`: how each is started, what one round of it gives, and the check of what it made."""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tranship.bench.children import run_child
from tranship.bench.workloads import Workload, write_prompts
from tranship.models.cache import cache_root
from tranship.models.catalog import get
from tranship.types import RunError

_LIMIT_S = 1800.0
_HERE = Path(__file__).parent
SIDES = ("ours", "plain_loop", "trl", "ours_bf16", "plain_loop_bf16")
# What is compared on each workload; the long one has no peer (TRL does not draw lengths) and one precision.
SIDES_OF: Mapping[str, tuple[str, ...]] = {
    "W": SIDES,
    "T": ("ours", "plain_loop", "trl"),
    "L": ("ours", "plain_loop"),
}


@dataclass(frozen=True)
class Round:
    """One round of one side: its counted steps, seconds from the command to the first step, its peak of memory."""

    steps: list[dict[str, Any]]
    first_step_s: float
    peak_bytes: int
    versions: dict[str, str]

    @property
    def tokens(self) -> int:
        """Generated tokens of the counted steps."""
        return sum(step["tokens"] for step in self.steps)

    @property
    def seconds(self) -> float:
        """Wall time of the counted steps."""
        return sum(step["seconds"] for step in self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second of wall time."""
        return self.tokens / self.seconds

    def stage_seconds(self, stage: str) -> float:
        """Seconds of a stage in a counted step, the mean."""
        return sum(step["stages"].get(stage, 0.0) for step in self.steps) / len(self.steps)


def trl_python() -> Path:
    """The interpreter of TRL's own environment, whether it is there or not."""
    return cache_root() / "peers" / "trl" / "bin" / "python"


def run_round(side: str, workload: Workload, folder: Path, *, seed: int) -> Round:
    """One round in a process of its own. Raises RunError if it fails or did not do the workload."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_prompts(workload, folder / "prompts.jsonl")
    spec = dataclasses.asdict(workload) | {
        "model": str(get(workload.model, log=lambda line: None)),
        "prompts": str(folder / "prompts.jsonl"),
        "steps": workload.steps,
        "lengths": workload.lengths(),
        "dtype": "bf16" if side.endswith("_bf16") else "fp32",
        "seed": seed,
        "reward_file": str(_HERE / "dense_reward.py"),
    }
    # What `tranship train` sets for itself; the others run as they come.
    env = {"OMP_WAIT_POLICY": "PASSIVE"} if side.startswith("ours") else None
    child = run_child(_command(side.removesuffix("_bf16")), spec, folder, _LIMIT_S, env)
    check_content(side, workload, child.values)
    shutil.rmtree(folder, ignore_errors=True)
    first_step_s = child.values["first_step_at"] - child.started_at
    return Round(child.values["steps"][1:], first_step_s, child.peak_bytes, child.values["versions"])


def _command(side: str) -> list[str]:
    if side == "trl":
        return [str(trl_python()), str(_HERE / "trl_peer.py")]
    return [sys.executable, "-m", f"tranship.bench.{side}"]


def check_content(side: str, workload: Workload, report: Mapping[str, Any]) -> None:
    """Raise RunError unless the side did the workload: all samples, within the cap, finite losses, new weights."""
    steps = report["steps"]
    if len(steps) != workload.steps:
        raise RunError(f"{side} on {workload.name}: {len(steps)} steps instead of {workload.steps}")
    if not report["weights_changed"]:
        raise RunError(f"{side} on {workload.name}: the weights did not change")
    lengths = workload.lengths()
    for index, step in enumerate(steps):
        where = f"{side} on {workload.name}, step {index + 1}"
        if step["samples"] != workload.num_samples or step.get("invalid", 0):
            raise RunError(
                f"{where}: {step['samples']} samples, {step.get('invalid', 0)} of them invalid, instead of "
                f"{workload.num_samples}"
            )
        if not 0 < step["longest"] <= workload.max_new_tokens:
            raise RunError(f"{where}: a response of {step['longest']} tokens; the cap is {workload.max_new_tokens}")
        if not math.isfinite(step["loss"]):
            raise RunError(f"{where}: the loss is {step['loss']}")
        if lengths is not None:
            drawn = sum(map(sum, lengths[index * workload.num_prompts : (index + 1) * workload.num_prompts]))
            if step["tokens"] != drawn:
                raise RunError(f"{where}: {step['tokens']} tokens instead of the drawn {drawn}")


def check_same_prompts(workload: Workload, done: Mapping[str, Sequence[Round]]) -> None:
    """Raise RunError unless all sides read the same prompts through the same template: equal prompt tokens a step."""
    seen = {side: [step["prompt_tokens"] for step in rounds[0].steps] for side, rounds in done.items() if rounds}
    if len({tuple(tokens) for tokens in seen.values()}) > 1:
        raise RunError(f"the sides read different prompts on {workload.name}: prompt tokens by side {seen}")
