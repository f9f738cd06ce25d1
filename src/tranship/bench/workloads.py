"""What every side of `bench e2e` does: the workloads of one step, fixed before any run, as plain data."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

_SEED = 20260601


@dataclass(frozen=True)
class Workload:
    """num_prompts x group_size samples a step, at most max_new_tokens each, at temperature 1.

    model: a name of the catalog. drawn: False lets the model end its responses; True ignores the end of text and
    gives each response a length of its own, see `drawn_length`. counted_steps: timed steps of
    one process, after one warm-up step. plain_rows, trl_rows: rows of one forward and backward pass of those sides
    (TRL's default on W, with as many accumulation steps as the batch needs).
    """

    name: str
    model: str
    num_prompts: int
    group_size: int
    max_new_tokens: int
    counted_steps: int
    plain_rows: int
    trl_rows: int
    drawn: bool = False
    learning_rate: float = 1e-6

    @property
    def num_samples(self) -> int:
        """Samples of one step."""
        return self.num_prompts * self.group_size

    @property
    def steps(self) -> int:
        """Steps of one process, the warm-up included."""
        return 1 + self.counted_steps

    def lengths(self) -> list[list[int]] | None:
        """Response tokens of each sample by group, groups of all steps in order; None where the model ends them."""
        if not self.drawn:
            return None
        groups, samples = range(self.steps * self.num_prompts), range(self.group_size)
        return [[drawn_length(group, sample, self.max_new_tokens) for sample in samples] for group in groups]

    def describe(self) -> str:
        """One line for the table."""
        ends = f", lengths log-normal around {self.max_new_tokens // 4}" if self.drawn else ""
        return (
            f"{self.name}: {self.model}, {self.num_prompts} prompts x {self.group_size} samples, "
            f"at most {self.max_new_tokens} tokens{ends}"
        )


WORKLOADS: dict[str, Workload] = {
    "W": Workload("W", "smollm2-135m", 8, 8, 24, counted_steps=1, plain_rows=16, trl_rows=8),
    "L": Workload("L", "smollm2-135m", 4, 8, 512, counted_steps=1, plain_rows=4, trl_rows=4, drawn=True),
    "T": Workload("T", "tiny-random", 32, 8, 64, counted_steps=3, plain_rows=64, trl_rows=64, learning_rate=1e-5),
}

# Smaller, so that `--quick` ends in a minute: it shows that everything works, and roughly how it compares.
QUICK: dict[str, Workload] = {
    "W": replace(WORKLOADS["W"], num_prompts=2, group_size=4, plain_rows=8),
    "L": replace(WORKLOADS["L"], num_prompts=1, group_size=4, max_new_tokens=128),
    "T": replace(WORKLOADS["T"], num_prompts=8, max_new_tokens=32, counted_steps=1),
}


def drawn_length(group: int, sample: int, cap: int) -> int:
    """Tokens of one response, 1 to cap: log-normal around cap / 4, the cap at two standard deviations (128 of 512)."""
    normal = np.random.default_rng((_SEED, group, sample)).standard_normal()
    return int(np.clip(round(cap / 4 * math.exp(math.log(4) / 2 * normal)), 1, cap))


def write_prompts(workload: Workload, path: Path) -> None:
    """Write the prompts of all steps, in order, as JSONL in verl's schema."""
    random = np.random.default_rng(_SEED)
    with path.open("w", encoding="utf-8") as file:
        for a, b in random.integers(1, 100, (workload.steps * workload.num_prompts, 2)).tolist():
            file.write(json.dumps(_row(a, b)) + "\n")


def _row(a: int, b: int) -> dict[str, Any]:
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"What is {a} + {b}? Answer with just the number."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {},
    }
