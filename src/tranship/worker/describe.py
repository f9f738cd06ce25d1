"""A sample's record for people and for the metrics: what was asked, what was said, what it was worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tranship.dock import Batch


def sample_record(batch: Batch, row: int, decode: Callable[[np.ndarray], str]) -> dict[str, Any]:
    """One sample as samples.jsonl holds it: `input, output, gts, score` and what the dock knows beside them."""
    sample = batch.ids[row]
    info, reward = batch["prompt_info"][row], batch["reward"][row]
    return {
        "input": info["text"],
        "output": decode(batch["response"][row]),
        "gts": info["ground_truth"],
        "score": reward["value"],
        "data_source": info["data_source"],
        "group_id": sample.group_id,
        "sample_index": sample.sample_index,
        "attempt": sample.attempt,
        "status": reward["status"],
        "reason": reward["reason"],
        "extra": reward["extra"],
        "finish_reason": batch["finish_reason"][row],
        "prompt_tokens": len(batch["prompt"][row]),
        "num_tokens": len(batch["response"][row]),
    }


def sampling_record(batch: Batch, row: int) -> dict[str, Any]:
    """What the sampler knew of a training sample: its versions and its mean log-prob (none for an empty response)."""
    versions, logprobs = batch["policy_versions"][row], batch["logprobs"][row]
    return {
        "versions": [int(versions.min()), int(versions.max())] if len(versions) else [],
        "logprob_mean": float(np.mean(logprobs)) if len(logprobs) else None,
    }
