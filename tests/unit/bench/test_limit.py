"""The work of a step, counted by hand, and what a folder's config says of its matrices."""

from __future__ import annotations

import json
from pathlib import Path

from tranship.bench.limit import matrix_shape, step_flops


def test_flops_of_a_step() -> None:
    # body 10, head 3; 2 prompts of 7 tokens together; 5 response tokens.
    prefill = 2 * 10 * 7 + 2 * 3 * 2
    decode = 2 * (10 + 3) * 5
    train = 6 * 10 * (7 + 5) + 6 * 3 * 5
    assert step_flops({"body": 10, "head": 3}, 7, 2, 5) == prefill + decode + train


def test_matrices_of_smollm2(tmp_path: Path) -> None:
    config = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = matrix_shape(tmp_path)
    # 134,515,008 parameters, less 61 norms of 576 elements.
    assert shape["body"] + shape["head"] == 134_515_008 - 61 * 576
    assert shape["head"] == 49152 * 576
