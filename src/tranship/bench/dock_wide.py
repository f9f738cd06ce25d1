"""Wide columns of `bench dock`: several values per token, or per sample, of realistic size. Imports numpy alone."""

from __future__ import annotations

import numpy as np

# Kind -> its columns. routing: which experts a mixture chose, uint8 [tokens, 48 layers, top 8], replayed in training.
# top_k: log-probs of the 20 likeliest tokens, float32 [tokens, 20], and their ids, int32 [tokens, 20]. image: uint8
# [height, width, 3], of 448 x 448.
KINDS = {"routing": ("routing",), "top_k": ("top_logprobs", "top_ids"), "image": ("image",)}
LAYERS, TOP_EXPERTS, TOP_TOKENS, SIDE = 48, 8, 20, 448


def make(kind: str, count: int, tokens: int) -> dict[str, list[np.ndarray]]:
    """The columns of so many rows with about so many tokens each, all of them different."""
    rng = np.random.default_rng(0)
    lengths = [tokens - place % 8 for place in range(count)]
    if kind == "routing":
        return {"routing": [rng.integers(0, 128, (n, LAYERS, TOP_EXPERTS), dtype=np.uint8) for n in lengths]}
    if kind == "top_k":
        return {
            "top_logprobs": [-rng.random((n, TOP_TOKENS), dtype=np.float32) for n in lengths],
            "top_ids": [rng.integers(0, 1 << 17, (n, TOP_TOKENS), dtype=np.int32) for n in lengths],
        }
    assert kind == "image", kind
    return {"image": [rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(count)]}
