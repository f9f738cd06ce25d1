"""Moving a bucket's bytes: out of the source's storages into a buffer, and out of a buffer into the target's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tranship.layouts import Box
from tranship.reshard.plan import Bucket, Move

# The tensor behind a storage's name.
StorageFn = Callable[[str], torch.Tensor]


def new_buffer(num_bytes: int) -> torch.Tensor:
    """A buffer uint8 [num_bytes] for pack and unpack; padding in it is zero and stays so within one bucket's use."""
    return torch.zeros(num_bytes, dtype=torch.uint8)


def pack(bucket: Bucket, storage: StorageFn, buffer: torch.Tensor) -> torch.Tensor:
    """The bucket's bytes, uint8 [bucket.num_bytes], a view of `buffer`; values are cast to the target's dtype."""
    with torch.no_grad():
        end = 0
        for move in bucket.moves:
            buffer[end : move.offset].zero_()
            _slot(move, buffer).copy_(_region(storage(move.source_storage), move.source_box, move))
            end = move.offset + move.num_bytes
        buffer[end : bucket.num_bytes].zero_()
    return buffer[: bucket.num_bytes]


def unpack(bucket: Bucket, buffer: torch.Tensor, storage: StorageFn) -> None:
    """Write a bucket's bytes where the target wants them."""
    with torch.no_grad():
        for move in bucket.moves:
            _target(move, storage).copy_(_slot(move, buffer))


def repack(bucket: Bucket, storage: StorageFn, buffer: torch.Tensor) -> torch.Tensor:
    """The bucket's bytes as they now lie in the target's storages: what `pack` gave, if all is well."""
    with torch.no_grad():
        end = 0
        for move in bucket.moves:
            buffer[end : move.offset].zero_()
            _slot(move, buffer).copy_(_target(move, storage))
            end = move.offset + move.num_bytes
        buffer[end : bucket.num_bytes].zero_()
    return buffer[: bucket.num_bytes]


def _slot(move: Move, buffer: torch.Tensor) -> torch.Tensor:
    """The move's place in a buffer, with the shape of its box."""
    flat = buffer[move.offset : move.offset + move.num_bytes].view(getattr(torch, move.dtype))
    return flat.view([stop - start for start, stop in move.box])


def _target(move: Move, storage: StorageFn) -> torch.Tensor:
    tensor = storage(move.target_storage)
    assert tensor.dtype == getattr(torch, move.dtype), f"{move.target_storage}: {tensor.dtype}, planned {move.dtype}"
    return _region(tensor, move.target_box, move)


def _region(tensor: torch.Tensor, box: Box, move: Move) -> torch.Tensor:
    """The view of `tensor` inside `box`, with the shape of the move's box."""
    assert tensor.dim() == len(box), f"{move.name}: storage of shape {tuple(tensor.shape)}, planned box {box}"
    region = tensor[tuple(slice(start, stop) for start, stop in box)]
    return region.view([stop - start for start, stop in move.box]) if len(box) != len(move.box) else region
