"""A sample's record for people and for the metrics: what was asked, what was said, what it was worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tranship.dock import Batch

_TOKEN_DTYPES = {"token_ids": np.int32, "logprobs": np.float32, "response_mask": np.bool_, "ref_logprobs": np.float32}


def sample_record(batch: Batch, row: int, decode: Callable[[np.ndarray], str]) -> dict[str, Any]:
    """One sample as samples.jsonl holds it: `input, output, gts, score` and what the dock knows beside them."""
    sample = batch.ids[row]
    info, reward = batch["prompt_info"][row], batch["reward"][row]
    return {
        "input": info["text"],
        "output": decode(batch["response"][row]),
        "gts": info["ground_truth"],
        "score": reward["value"],
        "raw": reward["raw"],
        "data_source": info["data_source"],
        "group_id": sample.group_id,
        "sample_index": sample.sample_index,
        "attempt": sample.attempt,
        "status": reward["status"],
        "reason": reward["reason"],
        "extra": reward["extra"],
        "rollout_info": batch["rollout_info"][row],
        "finish_reason": batch["finish_reason"][row],
        "prompt_tokens": len(batch["prompt"][row]),
        "num_tokens": len(batch["response"][row]),
    }


def sampling_record(batch: Batch, row: int) -> dict[str, Any]:
    """What the sampler knew of a training sample: its versions and its mean log-prob (none for an empty response)."""
    written = batch["response_mask"][row]
    versions, logprobs = batch["policy_versions"][row][written], batch["logprobs"][row][written]
    return {
        "versions": [int(versions.min()), int(versions.max())] if len(versions) else [],
        "logprob_mean": float(np.mean(logprobs)) if len(logprobs) else None,
        "num_written": int(written.sum()),
    }


def token_record(batch: Batch, row: int, columns: Sequence[str]) -> dict[str, Any]:
    """What a snapshot shows of each token, as bytes of arrays [T], since events are plain; columns: what the stage
    reads. `unpack_tokens` makes arrays of it."""
    fields = {
        "token_ids": batch["response"][row],
        "logprobs": batch["logprobs"][row],
        "response_mask": batch["response_mask"][row],
    }
    if "ref_logprobs" in columns:
        fields["ref_logprobs"] = batch["ref_logprobs"][row]
    return {name: np.asarray(values, dtype=_TOKEN_DTYPES[name]).tobytes() for name, values in fields.items()}


def unpack_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample's record with arrays [T] in the place of the bytes of `token_record`."""
    arrays = {name: np.frombuffer(sample[name], dtype) for name, dtype in _TOKEN_DTYPES.items() if name in sample}
    return {**sample, **arrays}
