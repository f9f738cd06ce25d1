"""What of a tensor lies on one of several ranks that hold a model together, as boxes."""

from __future__ import annotations

from dataclasses import dataclass

from tranship.layouts.pieces import Box, full_box

Bounds = tuple[int, int]


@dataclass(frozen=True)
class Share:
    """Rank `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def divides(self, count: int) -> bool:
        """Whether `part` can give out `count` things."""
        return count % self.size == 0 or self.size % count == 0

    def part(self, count: int) -> Bounds:
        """Which of `count` like things this rank holds: as many as every other, or, where there are fewer things than
        ranks, one that its neighbours hold too."""
        assert self.divides(count), f"{count} things for {self.size} ranks"
        start = self.rank * count // self.size
        return start, start + max(1, count // self.size)

    def stretch(self, extent: int) -> Bounds:
        """Which of `extent` rows this rank holds, where the last rank may have fewer than the others."""
        step = self.step(extent)
        return min(self.rank * step, extent), min((self.rank + 1) * step, extent)

    def step(self, extent: int) -> int:
        """Rows of a stretch but the last."""
        return -(-extent // self.size)


def scaled(bounds: Bounds, width: int) -> Bounds:
    """The elements of things that are `width` wide each."""
    return bounds[0] * width, bounds[1] * width


def cut(shape: tuple[int, ...], dim: int, bounds: Bounds) -> Box:
    """The box of a whole tensor, narrowed to `bounds` in dimension `dim`."""
    box = full_box(shape)
    return (*box[:dim], bounds, *box[dim + 1 :])
