"""The endless stream of prompts: which one has which group_id, by (seed, group_id) alone.

**One source.** Each row is given once an epoch, in the order of that epoch (`tranship.data.orders`). Group ids count on
over epochs: with N rows, epoch e is the ids e * N to (e + 1) * N - 1.

**A mixture.** The parts are interleaved by their weights, always in the same pattern: among the first g prompts of the
stream, each part has had its share of g, give or take fewer prompts than there are parts. Every part has epochs of its
own: each of its rows is given once before one of them is given again, and a part that runs out begins its next epoch
while the others go on. So there is no moment at which all parts begin anew; the epoch of a mixture counts how often
every part has been given wholly, and with weights in proportion to the parts' rows it is what it is for one source.

**Sizes.** Batches are cut from the stream as it goes. Where the rows do not divide by the prompts of a batch, a batch
takes the last rows of one epoch and the first of the next: every batch of an endless stream is full, no row is left
out, and none is given a second time to fill one up (the two occurrences of a row that meet in one batch are different
groups). A stream with an end (`epochs`) gives what is left, and then nothing. Held-out prompts do not come through
here: a validation admits each of them once, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tranship.config.schema import DataConfig
from tranship.data.orders import Order, as_given, find_order, shuffled
from tranship.data.promptset import PromptSet
from tranship.types import Prompt, UserError

_CACHED_ORDERS = 4


@dataclass(frozen=True)
class StreamPart:
    """Prompts that are given in proportion to a weight, relative to the other parts'."""

    prompts: Sequence[Prompt]
    weight: float = 1.0


def make_stream(prompt_set: PromptSet, data: DataConfig, seed: int) -> PromptStream:
    """The stream of a set's prompts, in the order and the proportions that the settings ask for.

    Raises UserError for an order that is not known, does not take its arguments, or does not give each row once.
    """
    parts = [StreamPart(prompt_set.of_part(part), part.weight) for part in prompt_set.parts]
    stream = PromptStream(parts or prompt_set.prompts, seed, order=find_order(data))
    stream.check()
    return stream


class PromptStream:
    """Prompts by group_id: the number of the prompt's occurrence, from 0. `position` is all that a resume needs.

    parts: prompts, or parts of a mixture. shuffle, order: the order of an epoch (order: see `tranship.data.orders`;
    it stands above shuffle). epochs: how often each prompt is given (of a mixture: at least); None: without end. To
    enter anywhere costs a few steps for each part, and the order of the epoch that is entered.
    """

    def __init__(
        self,
        parts: Sequence[Prompt] | Sequence[StreamPart],
        seed: int,
        shuffle: bool = True,
        epochs: int | None = None,
        position: int = 0,
        *,
        order: Order | None = None,
    ) -> None:
        self._parts = _as_parts(parts)
        assert all(len(part.prompts) for part in self._parts), "each part of a stream needs a prompt"
        self._seed = seed
        self._order = order or (shuffled if shuffle else as_given)
        self._splits = _splits([part.weight for part in self._parts])
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._end = None if epochs is None else self._position_after(epochs)
        self.seek(position)

    @property
    def position(self) -> int:
        """How many prompts were handed out: the next group_id."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt belongs to, from 0; of a mixture: how often each part was given wholly."""
        return self._whole_epochs(self._position)

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
        before, after = self._given(group_id), self._given(group_id + 1)
        part = next(index for index, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        prompts = self._parts[part].prompts
        epoch, place = divmod(before[part], len(prompts))
        return prompts[int(self._epoch_order(part, epoch)[place])]

    def check(self) -> None:
        """Raise UserError where the order of a first epoch does not give each row once."""
        for part in range(len(self._parts)):
            self._epoch_order(part, 0)

    def _given(self, position: int) -> list[int]:
        """How many of the first `position` prompts come from each part.

        What is left is split between the next part and all later ones. Each split rounds a share of at most 1 up, so
        that of two neighbouring positions exactly one part differs, by one. Whole numbers only: no rounding error.
        """
        counts = []
        for share in self._splits:
            count = -(-position * share.numerator // share.denominator)
            counts.append(count)
            position -= count
        return counts

    def _whole_epochs(self, position: int) -> int:
        counts = self._given(position)
        return min(count // len(part.prompts) for count, part in zip(counts, self._parts, strict=True))

    def _position_after(self, epochs: int) -> int:
        """The first position at which each part was given `epochs` times."""
        high = 1
        while self._whole_epochs(high) < epochs:
            high *= 2
        low = 0
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._whole_epochs(middle) >= epochs else (middle + 1, high)
        return low

    def _epoch_order(self, part: int, epoch: int) -> np.ndarray:
        key = (part, epoch)
        if key not in self._orders:
            prompts = self._parts[part].prompts
            # Parts of equal length must not be in the same order; a stream of one source keeps the run's seed.
            seed = (self._seed + part * 0x9E3779B97F4A7C15) % 2**64
            order = np.asarray(self._order(prompts, epoch=epoch, seed=seed))
            if order.shape != (len(prompts),) or not np.array_equal(np.sort(order), np.arange(len(prompts))):
                raise UserError(
                    f"data.order: epoch {epoch} of {len(prompts)} prompts is not each of 0 to {len(prompts) - 1} once "
                    f"(shape {order.shape}): return a permutation"
                )
            while len(self._orders) >= _CACHED_ORDERS * len(self._parts):
                del self._orders[next(iter(self._orders))]
            self._orders[key] = order
        return self._orders[key]


def _as_parts(parts: Sequence[Prompt] | Sequence[StreamPart]) -> list[StreamPart]:
    given = [part for part in parts if isinstance(part, StreamPart)]
    if given:
        assert len(given) == len(parts), "prompts and parts are not mixed"
        return given
    return [StreamPart([prompt for prompt in parts if isinstance(prompt, Prompt)])]


def _splits(weights: Sequence[float]) -> list[Fraction]:
    """Each part's share of what the parts before it leave; exact, from the weights as they were written."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    return [weight / sum(exact[index:]) for index, weight in enumerate(exact)]
