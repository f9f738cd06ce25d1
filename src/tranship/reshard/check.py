"""Whether two layouts can be the two sides of one plan: the same tensors, sane pieces, every element in its place."""

from __future__ import annotations

from tranship.layouts import Box, Layout, Piece, full_box, intersect, subtract
from tranship.types import UserError

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}


def check_layouts(source: Layout, target: Layout) -> None:
    """Raises UserError that names the tensor where the sides disagree, or the target lacks or repeats an element.

    That the source holds every element is found out while sources are chosen.
    """
    _check_names(source, target)
    _check_targets(target)


def _shapes(layout: Layout, side: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for pieces in layout.ranks:
        for piece in pieces:
            if shapes.setdefault(piece.name, piece.shape) != piece.shape:
                raise UserError(
                    f"tensor {piece.name!r} has two shapes in the {side} layout: {shapes[piece.name]} and {piece.shape}"
                )
            _check_piece(piece, side)
    return shapes


def _check_piece(piece: Piece, side: str) -> None:
    inside = len(piece.box) == len(piece.shape) and all(
        0 <= start < stop <= extent for (start, stop), extent in zip(piece.box, piece.shape, strict=True)
    )
    lead = len(piece.storage_box) - len(piece.box)
    extents = [stop - start for start, stop in piece.storage_box]
    same = lead >= 0 and extents == [1] * lead + [stop - start for start, stop in piece.box]
    if not inside or not same or piece.dtype not in DTYPE_BYTES:
        raise UserError(
            f"a piece of tensor {piece.name!r} in the {side} layout makes no sense: box {piece.box} of shape "
            f"{piece.shape} in box {piece.storage_box} of storage {piece.storage!r} ({piece.dtype})"
        )


def _check_names(source: Layout, target: Layout) -> None:
    """Both sides must have the same tensors, of the same shapes."""
    sources, targets = _shapes(source, "source"), _shapes(target, "target")
    for name, shape in targets.items():
        if name not in sources:
            raise UserError(f"tensor {name!r} of the target is in no source piece: the two sides hold different models")
        if sources[name] != shape:
            raise UserError(f"tensor {name!r} has shape {sources[name]} in the source but {shape} in the target")
    if unused := [name for name in sources if name not in targets]:
        raise UserError(
            f"no target piece takes tensor {unused[0]!r} of the source ({len(unused)} such): "
            "the two sides hold different models"
        )


def _check_targets(target: Layout) -> None:
    """Over all ranks the target must hold every element, and on one rank no storage element may be written twice."""
    missing: dict[str, list[Box]] = {}
    for pieces in target.ranks:
        storages: dict[str, list[Piece]] = {}
        for piece in pieces:
            left = missing.setdefault(piece.name, [full_box(piece.shape)])
            missing[piece.name] = [rest for box in left for rest in subtract(box, piece.box)]
            storages.setdefault(piece.storage, []).append(piece)
        for written in storages.values():
            _check_overlap(written)
    for name, boxes in missing.items():
        if boxes:
            raise UserError(f"tensor {name!r}: the target has no place for its box {boxes[0]}")


def _check_overlap(written: list[Piece]) -> None:
    """Pieces of one storage must not overlap in it. They are swept along the first dimension."""
    active: list[Piece] = []
    for piece in sorted(written, key=lambda piece: piece.storage_box[:1]):
        start = piece.storage_box[0][0] if piece.storage_box else 0
        active = [other for other in active if not other.storage_box or other.storage_box[0][1] > start]
        for other in active:
            if len(piece.storage_box) != len(other.storage_box):
                raise UserError(
                    f"tensors {other.name!r} and {piece.name!r} disagree about the dimensions of the target's "
                    f"storage {piece.storage!r}"
                )
            if intersect(piece.storage_box, other.storage_box) is not None:
                raise UserError(
                    f"tensors {other.name!r} and {piece.name!r} overlap in the target's storage {piece.storage!r}"
                )
        active.append(piece)
