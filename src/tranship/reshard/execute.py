"""Moving a bucket's bytes: out of the source's storages, through a buffer, into the target's.

Digests (xxh3, 128 bits, hexadecimal) are taken move by move, while the bytes are still in the processor's cache. They
are those of the whole bucket, padding (zeros) included, whichever function takes them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import xxhash

from tranship.layouts import Box
from tranship.reshard.plan import Bucket, Move

# The tensor behind a storage's name.
StorageFn = Callable[[str], torch.Tensor]
_PART_BYTES = 256 << 10


def new_buffer(num_bytes: int) -> torch.Tensor:
    """A buffer uint8 [num_bytes] for the functions below; it can be used again and again."""
    return torch.zeros(num_bytes, dtype=torch.uint8)


def digest(buffer: torch.Tensor) -> str:
    """The digest of a bucket's bytes, contiguous uint8."""
    return xxhash.xxh3_128_hexdigest(_bytes(buffer))


@torch.no_grad()
def pack(bucket: Bucket, source: StorageFn, buffer: torch.Tensor) -> tuple[torch.Tensor, str]:
    """The bucket's bytes, uint8 [bucket.num_bytes], a view of `buffer`, and their digest.

    Values are cast to the target's dtype.
    """
    hashed = xxhash.xxh3_128()
    end = 0
    for move in bucket.moves:
        buffer[end : move.offset].zero_()
        _slot(move, buffer).copy_(_region(source(move.source_storage), move.source_box, move))
        hashed.update(_bytes(buffer[end : move.offset + move.num_bytes]))
        end = move.offset + move.num_bytes
    hashed.update(_bytes(buffer[end : bucket.num_bytes].zero_()))
    return buffer[: bucket.num_bytes], hashed.hexdigest()


@torch.no_grad()
def unpack(bucket: Bucket, buffer: torch.Tensor, target: StorageFn) -> str:
    """Write a bucket's bytes, uint8 [bucket.num_bytes], where the target wants them; returns their digest."""
    hashed = xxhash.xxh3_128()
    end = 0
    for move in bucket.moves:
        hashed.update(_bytes(buffer[end : move.offset + move.num_bytes]))
        _place(move, target).copy_(_slot(move, buffer))
        end = move.offset + move.num_bytes
    hashed.update(_bytes(buffer[end : bucket.num_bytes]))
    return hashed.hexdigest()


@torch.no_grad()
def transfer(bucket: Bucket, source: StorageFn, target: StorageFn, buffer: torch.Tensor) -> tuple[str, str]:
    """Move a bucket inside one process. Returns the digest of what the source sent, after the cast, and that of what
    then lies in the target; they differ if anything went wrong between.

    Bytes that need no cast and lie in one stretch go straight across, the others through `buffer`.
    """
    sent, found = xxhash.xxh3_128(), xxhash.xxh3_128()
    end = 0
    for move in bucket.moves:
        region, place = _region(source(move.source_storage), move.source_box, move), _place(move, target)
        if region.dtype != place.dtype or not _is_stretch(region):
            region = _slot(move, buffer).copy_(region)
        if move.offset > end:
            padding = bytes(move.offset - end)
            sent.update(padding)
            found.update(padding)
        # Asked for again: a target that hands out copies does not keep what is written.
        kept = _place(move, target)
        if _is_stretch(place) and _is_stretch(kept):
            _copy_hashed(_bytes(region), _bytes(place), _bytes(kept), sent, found)
        else:
            sent.update(_bytes(region))
            place.copy_(region)
            found.update(_bytes(_slot(move, buffer).copy_(kept)))
        end = move.offset + move.num_bytes
    padding = bytes(bucket.num_bytes - end)
    sent.update(padding)
    found.update(padding)
    return sent.hexdigest(), found.hexdigest()


def _copy_hashed(
    region: memoryview, place: memoryview, kept: memoryview, sent: xxhash.xxh3_128, found: xxhash.xxh3_128
) -> None:
    """Copy bytes, a part at a time that stays in the processor's cache between the three passes over it."""
    for start in range(0, len(region), _PART_BYTES):
        part = slice(start, start + _PART_BYTES)
        sent.update(region[part])
        place[part] = region[part]
        found.update(kept[part])


@torch.no_grad()
def read_back(bucket: Bucket, target: StorageFn, buffer: torch.Tensor) -> str:
    """The digest of the bucket's bytes as they lie in the target now."""
    hashed = xxhash.xxh3_128()
    end = 0
    for move in bucket.moves:
        hashed.update(bytes(move.offset - end))
        place = _place(move, target)
        hashed.update(_bytes(place if _is_stretch(place) else _slot(move, buffer).copy_(place)))
        end = move.offset + move.num_bytes
    hashed.update(bytes(bucket.num_bytes - end))
    return hashed.hexdigest()


def _is_stretch(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes can be read where they are, as one stretch of this process's memory."""
    return tensor.is_contiguous() and tensor.device.type == "cpu"


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _slot(move: Move, buffer: torch.Tensor) -> torch.Tensor:
    """The move's place in a buffer, with the shape of its box."""
    flat = buffer[move.offset : move.offset + move.num_bytes].view(getattr(torch, move.dtype))
    return flat.view([stop - start for start, stop in move.box])


def _place(move: Move, target: StorageFn) -> torch.Tensor:
    """The move's place in the target."""
    tensor = target(move.target_storage)
    assert tensor.dtype == getattr(torch, move.dtype), f"{move.target_storage}: {tensor.dtype}, planned {move.dtype}"
    return _region(tensor, move.target_box, move)


def _region(tensor: torch.Tensor, box: Box, move: Move) -> torch.Tensor:
    """The view of `tensor` inside `box`, with the shape of the move's box."""
    fits = tensor.dim() == len(box) and all(stop <= extent for (_, stop), extent in zip(box, tensor.shape, strict=True))
    assert fits, f"{move.name}: a storage of shape {tuple(tensor.shape)}, but planned is its box {box}"
    region = tensor[tuple(slice(start, stop) for start, stop in box)]
    return region.view([stop - start for start, stop in move.box]) if len(box) != len(move.box) else region
