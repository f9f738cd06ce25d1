"""Keys and values of finished responses, for a request that goes on after one of them: only its new tokens are
prefilled then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tranship.rollout.native.model import Chunk


@dataclass(frozen=True)
class _Kept:
    token_ids: np.ndarray
    kv_layers: Sequence[torch.Tensor]


class FinishedCache:
    """The most recent sequences, at most `capacity`. All of them are of the weights in use: an update clears it.

    A sequence is used once, and by a prompt alone that begins with all of its tokens; it depends on nothing else.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: list[_Kept] = []

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Drop everything."""
        self._kept.clear()

    def add(self, token_ids: np.ndarray, kv_layers: Sequence[torch.Tensor]) -> None:
        """Keep a sequence, int32 [L], with its keys and values, for each layer [sides, G, L, D]. The oldest one goes if
        there are too many."""
        self._kept.append(_Kept(token_ids, kv_layers))
        del self._kept[: -self._capacity]

    def take(self, prompt_ids: np.ndarray) -> Chunk:
        """What is to be computed of a prompt, int32 [P]: all of it, or what follows the longest sequence that is a
        beginning of it (at least one token). The sequence is dropped."""
        found = max(
            (kept for kept in self._kept if _begins(prompt_ids, kept.token_ids)),
            key=lambda kept: len(kept.token_ids),
            default=None,
        )
        if found is None:
            return Chunk(prompt_ids)
        self._kept = [kept for kept in self._kept if kept is not found]
        start = len(found.token_ids)
        return Chunk(prompt_ids[start:], start, found.kv_layers)


def _begins(prompt_ids: np.ndarray, token_ids: np.ndarray) -> bool:
    return len(token_ids) < len(prompt_ids) and np.array_equal(prompt_ids[: len(token_ids)], token_ids)
