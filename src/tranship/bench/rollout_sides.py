"""The sides of `bench rollout`, each in a process of its own, and the check of what they make."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tranship.bench.dock_pipe import Process
from tranship.bench.report import Report
from tranship.bench.rollout_work import Case
from tranship.models.cache import cache_root
from tranship.types import RunError

SIDES = ("native", "generate", "vllm", "ceiling")
_OURS = ("native", "generate", "ceiling")
_LIMIT_S = 600.0
# Mean and largest |log-prob gap| to a plain fp32 forward pass that a side may show, or it did something else.
_CHECKS = {"fp32": (1e-3, 2e-2), "bf16": (0.1, 2.0)}


def peer_python() -> Path:
    """The interpreter of vLLM's own environment, whether it is there or not."""
    return cache_root() / "peers" / "vllm" / "bin" / "python"


def command_of(side: str) -> list[str]:
    """How a side is started."""
    if side == "vllm":
        return [str(peer_python()), str(Path(__file__).with_name("rollout_vllm_peer.py"))]
    return [sys.executable, "-m", f"tranship.bench.rollout_{side}"]


def start(side: str, case: Case, model: Path, log: Path) -> tuple[Process, dict[str, Any]]:
    """A side that has loaded the model, and what it said. Raises RunError if it fails."""
    threads = len(os.sched_getaffinity(0))
    env = {"OMP_NUM_THREADS": str(threads)}
    if side in ("native", "ceiling"):
        # What `tranship train` sets for itself; the others run as they come.
        env["OMP_WAIT_POLICY"] = "PASSIVE"
    process = Process(command_of(side), log, env)
    message = {"do": "open", "model": str(model), "dtype": case.dtype, "threads": threads}
    try:
        return process, process.ask(message | {"max_batch": max(case.batches)}, _LIMIT_S)
    except RunError:
        process.end()
        raise


@dataclass
class Sides:
    """The sides that run one case. One of ours that fails ends the benchmark; a peer is left out with a note."""

    case: Case
    model: Path
    folder: Path
    report: Report

    def __post_init__(self) -> None:
        self.there: dict[str, Process] = {}

    def open(self, sides: Sequence[str]) -> None:
        """Start them, one after the other."""
        for side in sides:
            if side == "vllm" and not peer_python().exists():
                note = f"vLLM was not measured: {peer_python()} is not there (`make bench-env` makes it)"
                if note not in self.report.notes:
                    self.report.notes.append(note)
                continue
            try:
                self.there[side], said = start(side, self.case, self.model, self.folder / f"{side}.log")
            except RunError as error:
                self._failed(side, error)
                continue
            self.report.peers |= {name: version for name, version in said["versions"].items() if name != "torch"}

    def ask(self, side: str, **message: Any) -> dict[str, Any] | None:
        """What a side answers; None if it is not there (any more)."""
        if side not in self.there:
            return None
        try:
            return self.there[side].ask(message, _LIMIT_S)
        except RunError as error:
            self._failed(side, error)
            return None

    def check(self, side: str, reference: Process) -> float | None:
        """The largest |log-prob gap| of what a side made to a plain forward pass; None if the side is not there.

        Raises RunError if what it made is not from this model's distribution (a peer is then left out).
        """
        made = self.ask(side, do="check")
        if made is None:
            return None
        wanted = reference.ask({"do": "score", "prompts": made["prompts"], "ids": made["ids"]}, _LIMIT_S)
        gap = np.abs(np.array(made["logprobs"]) - np.array(wanted["logprobs"]))
        mean, largest = _CHECKS[self.case.dtype]
        if gap.mean() > mean or gap.max() > largest:
            self._failed(side, RunError(f"its log-probs are {gap.mean():.2g} off on average, {gap.max():.2g} at most"))
            return None
        return float(gap.max())

    def end(self) -> None:
        """End all of them."""
        for process in self.there.values():
            process.end()
        self.there.clear()

    def _failed(self, side: str, error: RunError) -> None:
        if side in self.there:
            self.there.pop(side).end()
        if side in _OURS:
            raise RunError(f"bench rollout: {side} on {self.case.model}, {self.case.dtype}: {error}") from error
        self.report.notes.append(f"{side} was not measured on {self.case.model}, {self.case.dtype}: {error}")
