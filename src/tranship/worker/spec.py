"""What a process of the run is told at its start: plain values, so that they can travel."""

from __future__ import annotations

from dataclasses import dataclass

from tranship.config import Config


@dataclass(frozen=True)
class WorkerSpec:
    """One worker: its stages (by name, in the order in which they are served), and what they are built from.

    model_dir: a Hugging Face folder. probe_ids: token ids on which trainer and sampler compare log-probs after each
    update. max_tokens: longest prompt plus response. eos_token_ids: what ends a response.
    """

    config: Config
    stages: tuple[str, ...]
    model_dir: str
    device: str
    num_threads: int
    probe_ids: tuple[int, ...]
    max_tokens: int
    eos_token_ids: tuple[int, ...]
