"""The ceiling of a decode step: reading all weights once at this machine's bandwidth, plus its products at the rate
that products of that many rows reach here. Attention, sampling and everything else count as nothing.

Run as `python -m tranship.bench.rollout_ceiling`; it answers lines of JSON.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tranship.bench.rollout_work import LONGEST, answer
from tranship.rollout.native.kernels import kernels_for
from tranship.rollout.native.linear import make_linear
from tranship.rollout.native.shape import ModelShape, read_shape

_COPY_BYTES = 256 << 20
_MEASURE_S = 0.4


def matrix_elements(shape: ModelShape, rows: int) -> tuple[int, int]:
    """(elements of the matrices that a step over `rows` tokens reads, elements that one token is multiplied with)."""
    attention = _attention(shape)
    read = used = shape.hidden * shape.vocab + shape.num_layers * attention
    for index in range(shape.num_layers):
        if shape.experts is None or index not in shape.expert_layers:
            read, used = read + 3 * shape.hidden * shape.mlp, used + 3 * shape.hidden * shape.mlp
            continue
        kind = shape.experts
        common = shape.hidden * (kind.num_experts + 3 * kind.shared_mlp)
        one = 3 * shape.hidden * kind.mlp
        read += common + one * min(kind.num_experts, rows * kind.top_k)
        used += common + one * kind.top_k
    return read, used


def _attention(shape: ModelShape) -> int:
    hidden, latent = shape.hidden, shape.latent
    if latent is None:
        return hidden * shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
    queries = shape.num_heads * (latent.nope_dim + latent.rope_dim)
    down = hidden * (latent.kv_rank + latent.rope_dim)
    up = shape.num_heads * (latent.nope_dim + latent.value_dim) * latent.kv_rank
    q = hidden * queries if latent.q_rank is None else latent.q_rank * (hidden + queries)
    return q + down + up + shape.num_heads * latent.value_dim * hidden


class Side:
    """Measures anew each time it is asked."""

    def open(self, model: str, dtype: str, threads: int, max_batch: int) -> dict[str, Any]:
        """Read the model's sizes."""
        torch.set_num_threads(threads)
        self._shape = read_shape(Path(model), LONGEST)
        self._dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        return {"versions": {}}

    @torch.no_grad()
    def measure(self, batch: int) -> dict[str, Any]:
        """Milliseconds of a step of `batch` rows at the ceiling, with the bandwidth and the rate that it rests on."""
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
        target = torch.zeros_like(source)
        bandwidth = 2 * _COPY_BYTES / _best(lambda: target.copy_(source))
        shape = self._shape
        weight = torch.randn(shape.mlp, shape.hidden).to(self._dtype)
        linear = make_linear(weight, None, kernels_for(weight.device, shape.head_dim))
        x = torch.randn(batch, shape.hidden).to(self._dtype)
        rate = 2.0 * batch * shape.mlp * shape.hidden / _best(lambda: linear(x))
        read, used = matrix_elements(shape, batch)
        seconds = read * self._dtype.itemsize / bandwidth + 2.0 * used * batch / rate
        return {"step_ms": 1e3 * seconds, "bandwidth_gb_s": bandwidth / 1e9, "gemm_gflops": rate / 1e9}


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest call."""
    best, end = float("inf"), time.perf_counter() + _MEASURE_S
    while time.perf_counter() < end:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


if __name__ == "__main__":
    side = Side()
    answer({"open": side.open, "measure": side.measure})
