"""A layout of weights as pieces: which box of which named tensor lies where. Pure data; knows no engine and no torch.

A box is a half-open range per dimension of the *logical* tensor, the one that a Hugging Face folder names. A piece
says that a box of a logical tensor lies in a box of a storage. Fused storages (q, k and v in one matrix, gate and up,
stacked experts) differ from plain ones by their storage boxes alone, so no table of renames is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """Box `box` of logical tensor `name` lies in box `storage_box` of the storage called `storage`.

    Both boxes have the same extents per dimension, except that a storage may have leading dimensions of extent 1 more
    (one expert of a stack). shape: that of the whole logical tensor. dtype: of the storage ("float32", "bfloat16").
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    storage: str
    storage_box: Box
    dtype: str


@dataclass(frozen=True)
class Layout:
    """The pieces of every rank of one side. The same logical element may lie on several ranks (replicas)."""

    ranks: tuple[tuple[Piece, ...], ...]


def full_box(shape: tuple[int, ...]) -> Box:
    """The box that covers a whole tensor."""
    return tuple((0, extent) for extent in shape)


def box_size(box: Box) -> int:
    """Elements in a box (1 for a scalar's empty box)."""
    size = 1
    for start, stop in box:
        size *= max(0, stop - start)
    return size


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if that is nothing."""
    shared = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def subtract(box: Box, cut: Box) -> list[Box]:
    """Boxes that cover what is in `box` but not in `cut`, without overlap."""
    shared = intersect(box, cut)
    if shared is None:
        return [box]
    rest = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, shared, strict=True)):
        for side in ((start, low), (high, stop)):
            if side[0] < side[1]:
                rest.append((*shared[:dim], side, *box[dim + 1 :]))
    return rest
