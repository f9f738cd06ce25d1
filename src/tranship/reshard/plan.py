"""From two layouts to the least set of moves. Pure and deterministic: the same plan on every rank; knows no torch.

A move copies one box of a logical tensor from a storage of the source to a storage of the target, cast to the target's
dtype. Moves are cut to a fraction of a bucket, keep the target's order (so layers arrive one after the other), and are
packed into buckets: one buffer from one source rank to one target rank. Buckets of one round need at most
`bucket_bytes` of buffer on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

from tranship.layouts import Box, Layout, Piece, box_size, intersect, subtract
from tranship.reshard.check import DTYPE_BYTES, check_layouts
from tranship.types import UserError

_ALIGNMENT = 64
_MOVES_PER_BUCKET = 8


@dataclass(frozen=True)
class Move:
    """Box `box` of tensor `name`, from a box of a source storage to a box of a target storage of dtype `dtype`.

    offset, num_bytes: where it lies in its bucket's buffer, contiguous, in `dtype`.
    """

    name: str
    box: Box
    source_storage: str
    source_box: Box
    target_storage: str
    target_box: Box
    dtype: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """The moves of one buffer of `num_bytes`, from one rank to one rank. index: its place in the plan."""

    index: int
    round: int
    source_rank: int
    target_rank: int
    moves: tuple[Move, ...]
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """All buckets, in order. colocated: rank i of the source and rank i of the target are one process.

    key: a digest of the whole plan; two ends that agree on it agree on every byte.
    """

    buckets: tuple[Bucket, ...]
    bucket_bytes: int
    colocated: bool
    key: str

    @property
    def num_rounds(self) -> int:
        """Rounds, each of at most one bucket for each pair of ranks."""
        return self.buckets[-1].round + 1 if self.buckets else 0

    def payload_bytes(self, *, between_processes: bool = False) -> int:
        """Bytes of all moves, without padding; between_processes: only those that leave their process."""
        return sum(
            move.num_bytes
            for bucket in self.buckets
            if not (between_processes and self.colocated and bucket.source_rank == bucket.target_rank)
            for move in bucket.moves
        )


@dataclass(frozen=True)
class _Part:
    """A move before it has a place in a bucket."""

    name: str
    box: Box
    source_rank: int
    source: Piece
    target_rank: int
    target: Piece
    num_bytes: int


def make_plan(source: Layout, target: Layout, *, bucket_bytes: int, colocated: bool = False) -> Plan:
    """The plan that fills every target piece once from source pieces.

    colocated: rank i of both sides is the same process, whose own pieces are used first. Raises UserError that names
    the tensor where the two sides disagree about what there is, or an element has no source or two targets.
    """
    if bucket_bytes < _ALIGNMENT:
        raise UserError(f"bucket_bytes {bucket_bytes} is too small: use at least {_ALIGNMENT}")
    check_layouts(source, target)
    parts = _choose_sources(source, target, max(_ALIGNMENT, bucket_bytes // _MOVES_PER_BUCKET), colocated)
    buckets = _pack(parts, bucket_bytes)
    key = xxhash.xxh3_128_hexdigest(repr((bucket_bytes, colocated, buckets)).encode())
    return Plan(buckets, bucket_bytes, colocated, key)


def _split(box: Box, most: int) -> Iterator[Box]:
    """`box` cut into boxes of at most `most` elements, along the first dimensions, as whole rows where they fit."""
    if box_size(box) <= most or not box:
        yield box
        return
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    row = box_size(box) // (stop - start)
    step = max(1, most // row)
    for low in range(start, stop, step):
        yield from _split((*box[:dim], (low, min(low + step, stop)), *box[dim + 1 :]), most)


def _choose_sources(source: Layout, target: Layout, most_bytes: int, colocated: bool) -> list[_Part]:
    """Every target box from the rank itself if it has it, else from the replica that has sent the least so far."""
    by_name: dict[str, list[tuple[int, Piece]]] = {}
    for rank, pieces in enumerate(source.ranks):
        for piece in pieces:
            by_name.setdefault(piece.name, []).append((rank, piece))
    loads = [0] * len(source.ranks)
    parts: list[_Part] = []
    for target_rank, piece in _in_target_order(target):
        size = DTYPE_BYTES[piece.dtype]
        for wanted in _split(piece.box, max(1, most_bytes // size)):
            left = [wanted]
            own = target_rank if colocated else -1
            for rank, held in sorted(by_name[piece.name], key=lambda entry: (entry[0] != own, loads[entry[0]])):
                rest: list[Box] = []
                for box in left:
                    shared = intersect(box, held.box)
                    if shared is None:
                        rest.append(box)
                        continue
                    num_bytes = box_size(shared) * size
                    parts.append(_Part(piece.name, shared, rank, held, target_rank, piece, num_bytes))
                    loads[rank] += num_bytes if rank != own else 0
                    rest += subtract(box, shared)
                left = rest
                if not left:
                    break
            if left:
                raise UserError(f"tensor {piece.name!r}: no source rank holds its box {left[0]}")
    return parts


def _in_target_order(target: Layout) -> list[tuple[int, Piece]]:
    """(rank, piece), tensor by tensor in the order in which ranks list them."""
    order: dict[str, int] = {}
    for pieces in target.ranks:
        for piece in pieces:
            order.setdefault(piece.name, len(order))
    entries = [(rank, piece) for rank, pieces in enumerate(target.ranks) for piece in pieces]
    return sorted(entries, key=lambda entry: order[entry[1].name])


def layer_of(name: str) -> str:
    """What of a name says which layer it belongs to: all up to its first number ("model.layers.7"), else all of it."""
    found = re.match(r"(.*?\.\d+)\.", name)
    return found.group(1) if found else name


def _pack(parts: Sequence[_Part], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Parts in rounds of buckets. A round ends where a rank's buffer is full, or early, at a layer that would not
    fit into what is left of a buffer that is at least half full."""
    rounds: list[list[_Part]] = []
    used: dict[tuple[str, int], int] = {}
    for index, part in enumerate(parts):
        ends = (("source", part.source_rank), ("target", part.target_rank))
        fullest = max(used.get(end, 0) for end in ends)
        needed = _padded(part.num_bytes)
        starts_layer = index > 0 and layer_of(part.name) != layer_of(parts[index - 1].name)
        if starts_layer and fullest * 2 >= bucket_bytes:
            needed = max(needed, _layer_bytes(parts, index, bucket_bytes))
        if not rounds or fullest + needed > bucket_bytes:
            rounds.append([])
            used = {}
        rounds[-1].append(part)
        for end in ends:
            used[end] = used.get(end, 0) + _padded(part.num_bytes)
    buckets: list[Bucket] = []
    for number, members in enumerate(rounds):
        pairs: dict[tuple[int, int], list[_Part]] = {}
        for part in members:
            pairs.setdefault((part.source_rank, part.target_rank), []).append(part)
        for (source_rank, target_rank), chosen in pairs.items():
            moves, num_bytes = _place(chosen)
            buckets.append(Bucket(len(buckets), number, source_rank, target_rank, moves, num_bytes))
    return tuple(buckets)


def _layer_bytes(parts: Sequence[_Part], start: int, enough: int) -> int:
    """Bytes that the layer which begins at `start` brings to that part's target; stops counting above `enough`."""
    layer, total = layer_of(parts[start].name), 0
    for part in parts[start:]:
        if layer_of(part.name) != layer or total > enough:
            break
        total += _padded(part.num_bytes) if part.target_rank == parts[start].target_rank else 0
    return total


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _place(parts: Sequence[_Part]) -> tuple[tuple[Move, ...], int]:
    """The moves of one bucket, one after the other, each aligned; and the bytes they take."""
    moves, offset = [], 0
    for part in parts:
        moves.append(
            Move(
                name=part.name,
                box=part.box,
                source_storage=part.source.storage,
                source_box=_storage_box(part.source, part.box),
                target_storage=part.target.storage,
                target_box=_storage_box(part.target, part.box),
                dtype=part.target.dtype,
                offset=offset,
                num_bytes=part.num_bytes,
            )
        )
        offset += _padded(part.num_bytes)
    return tuple(moves), offset


def _storage_box(piece: Piece, box: Box) -> Box:
    """Where a box of the logical tensor, inside the piece, lies in the piece's storage."""
    lead = len(piece.storage_box) - len(piece.box)
    moved = tuple(
        (low + start - base, low + stop - base)
        for (low, _), (base, _), (start, stop) in zip(piece.storage_box[lead:], piece.box, box, strict=True)
    )
    return piece.storage_box[:lead] + moved
