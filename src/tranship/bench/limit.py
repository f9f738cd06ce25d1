"""The physical limit of a step: its products, each group's prompt computed once, over the measured rate of products.

Run as `python -m tranship.bench.limit SPEC` it measures that rate, in a process of its own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

_SIZE = 2048
_MEASURE_S = 1.5


def step_flops(shape: dict[str, int], prompt_tokens: int, num_prompts: int, response_tokens: int) -> float:
    """Floating-point operations of the matrix products of one step; attention and element-wise work are left out.

    shape: `body`, elements of the matrices of all layers, and `head`, elements of the output matrix. prompt_tokens:
    over the distinct prompts. Two per element and token forward, four backward; the head runs on response tokens only
    (and once per prompt in the prefill).
    """
    prefill = 2.0 * shape["body"] * prompt_tokens + 2.0 * shape["head"] * num_prompts
    decode = 2.0 * (shape["body"] + shape["head"]) * response_tokens
    train = 6.0 * shape["body"] * (prompt_tokens + response_tokens) + 6.0 * shape["head"] * response_tokens
    return prefill + decode + train


def matrix_shape(model: Path) -> dict[str, int]:
    """`body` and `head` of a model folder of the Llama kind, from its config.json."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * inner
    return {"body": config["num_hidden_layers"] * layer, "head": hidden * config["vocab_size"]}


def measure(dtype: str) -> float:
    """Floating-point operations per second of a 2,048 cubed product, the best of 1.5 s: oneDNN in fp32, or bf16."""
    import torch

    torch.set_float32_matmul_precision("medium")
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    a, b = torch.randn(_SIZE, _SIZE).to(kind), torch.randn(_SIZE, _SIZE).to(kind)
    best, end = float("inf"), time.perf_counter() + _MEASURE_S
    while time.perf_counter() < end:
        began = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - began)
    return 2.0 * _SIZE**3 / best


def main(spec_file: str) -> None:
    """Measure the dtypes of the spec and write the report."""
    spec: dict[str, Any] = json.loads(Path(spec_file).read_text())
    Path(spec["report"]).write_text(json.dumps({dtype: measure(dtype) for dtype in spec["dtypes"]}))


if __name__ == "__main__":
    main(sys.argv[1])
