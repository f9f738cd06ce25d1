"""The endless stream of prompts: each row once an epoch, in an order that (seed, epoch) alone decides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from tranship.types import Prompt


class PromptStream:
    """Prompts by group_id: the number of the prompt's occurrence, from 0. `position` is all that a resume needs.

    epochs: how often each prompt is given; None: without end.
    """

    def __init__(
        self, prompts: Sequence[Prompt], seed: int, shuffle: bool, epochs: int | None = None, position: int = 0
    ) -> None:
        assert prompts, "a stream needs a prompt"
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._end = None if epochs is None else epochs * len(prompts)
        self.seek(position)

    @property
    def position(self) -> int:
        """How many prompts were handed out: the next group_id."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt belongs to, from 0."""
        return self._position // len(self._prompts)

    @property
    def num_left(self) -> int | None:
        """How many prompts are still to come; None: without end."""
        return None if self._end is None else self._end - self._position

    def seek(self, position: int) -> None:
        """Go on as if `position` prompts had been handed out."""
        assert position >= 0, position
        assert self._end is None or position <= self._end, (position, self._end)
        self._position = position

    def take(self, n: int) -> list[tuple[int, Prompt]]:
        """The next n prompts with their group_ids; fewer at the end of the last epoch."""
        stop = self._position + n if self._end is None else min(self._position + n, self._end)
        taken = [(group_id, self.at(group_id)) for group_id in range(self._position, stop)]
        self._position = stop
        return taken

    def at(self, group_id: int) -> Prompt:
        """The prompt of an occurrence, whether it was handed out or not."""
        assert group_id >= 0, group_id
        assert self._end is None or group_id < self._end, (group_id, self._end)
        epoch, place = divmod(group_id, len(self._prompts))
        if not self._shuffle:
            return self._prompts[place]
        return self._prompts[int(_order(self._seed, epoch, len(self._prompts))[place])]


@lru_cache(maxsize=8)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    """A permutation of count rows: the raw bits of Philox, sorted, so that no later version of numpy changes it."""
    key = np.array([seed % 2**64, epoch], np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
