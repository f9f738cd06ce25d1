"""Plans over random layouts: executed, every element equals the dense tensor's, at the least number of bytes."""

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tranship.layouts import Layout, Piece, box_size, full_box
from tranship.reshard.check import DTYPE_BYTES
from tranship.reshard.execute import digest, new_buffer, pack, transfer, unpack
from tranship.reshard.plan import layer_of, make_plan
from tranship.types import UserError

torch.set_num_threads(1)


@st.composite
def models(draw):
    """name -> shape of a small model's tensors, layer by layer."""
    shapes = {"embed.weight": (draw(st.integers(1, 40)), draw(st.integers(1, 6)))}
    width = draw(st.integers(1, 8))
    for layer in range(draw(st.integers(0, 3))):
        for name in ("q", "k", "v"):
            shapes[f"layers.{layer}.{name}.weight"] = (draw(st.integers(1, 9)), width)
        for expert in range(draw(st.integers(0, 3))):
            shapes[f"layers.{layer}.experts.{expert}.weight"] = (3, width)
        shapes[f"layers.{layer}.norm.weight"] = (width,)
    if draw(st.booleans()):
        shapes["scale"] = ()
    return shapes


def cuts(draw, extent, most):
    """Uneven borders that cut `extent` into at most `most` ranges."""
    inner = draw(st.lists(st.integers(1, max(1, extent - 1)), max_size=most - 1))
    borders = [0, *sorted({cut for cut in inner if 0 < cut < extent}), extent]
    return list(pairwise(borders))


@st.composite
def layouts(draw, shapes, dtype, most_coverings=1):
    """A layout of the model over a few ranks: shards of any dimension, replicas, pipeline stages, fused and stacked
    storages; some rank has each box. most_coverings: how often a tensor may be laid out anew, so that boxes overlap."""
    num_ranks = draw(st.integers(1, 4))
    placed = [[] for _ in range(num_ranks)]
    coverings = [item for item in shapes.items() for _ in range(draw(st.integers(1, most_coverings)))]
    for name, shape in coverings:
        dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
        ranges = cuts(draw, shape[dim], num_ranks) if shape else [None]
        for piece_range in ranges:
            box = list(full_box(shape))
            if piece_range is not None:
                box[dim] = piece_range
            holders = draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=num_ranks))
            for rank in holders:
                placed[rank].append((name, shape, tuple(box)))
    return Layout(tuple(tuple(storages(draw, pieces, dtype)) for pieces in placed))


def storages(draw, pieces, dtype):
    """Places for a rank's boxes: each in a storage of its own, or several of one width fused, or stacked."""
    fused = draw(st.booleans())
    made, rows = [], {}
    for number, (name, shape, box) in enumerate(pieces):
        extents = tuple(stop - start for start, stop in box)
        if fused and len(shape) == 2:
            stack = "experts" in name and extents[0] == 3
            storage = f"stack-{extents}" if stack else f"fused-{extents[1]}"
            start = rows.get(storage, 0)
            if stack:
                storage_box = ((start, start + 1), *((0, extent) for extent in extents))
                rows[storage] = start + 1
            else:
                storage_box = ((start, start + extents[0]), (0, extents[1]))
                rows[storage] = start + extents[0]
        else:
            storage, storage_box = f"{number}-{name}", tuple((0, extent) for extent in extents)
        made.append(Piece(name, shape, box, storage, storage_box, dtype))
    return made


def allocate(pieces, fill):
    """storage name -> tensor large enough for the pieces, filled with `fill`."""
    extents, dtypes = {}, {}
    for piece in pieces:
        stops = [stop for _, stop in piece.storage_box]
        known = extents.get(piece.storage, stops)
        extents[piece.storage] = [max(pair) for pair in zip(known, stops, strict=True)]
        dtypes[piece.storage] = getattr(torch, piece.dtype)
    return {name: torch.full(extents[name], fill, dtype=dtypes[name]) for name in extents}


def region(tensor, box):
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def load(layout, dense):
    """Every rank's storages with the dense values in place."""
    ranks = []
    for pieces in layout.ranks:
        tensors = allocate(pieces, 0)
        for piece in pieces:
            place = region(tensors[piece.storage], piece.storage_box)
            place.copy_(region(dense[piece.name], piece.box).reshape(place.shape))
        ranks.append(tensors)
    return ranks


@st.composite
def cases(draw):
    shapes = draw(models())
    source = draw(layouts(shapes, "float32", most_coverings=2))
    target = draw(layouts(shapes, draw(st.sampled_from(["float32", "bfloat16"]))))
    return shapes, source, target, draw(st.sampled_from([64, 100, 256, 1000, 1 << 20])), draw(st.booleans())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_an_executed_plan_puts_every_element_in_place_once_at_the_least_cost(case):
    shapes, source, target, bucket_bytes, colocated = case
    dense = {name: torch.randn(shape) if shape else torch.randn(()) for name, shape in shapes.items()}
    plan = make_plan(source, target, bucket_bytes=bucket_bytes, colocated=colocated)
    sources = load(source, dense)
    targets = [allocate(pieces, float("nan")) for pieces in target.ranks]
    moved = [allocate(pieces, float("nan")) for pieces in target.ranks]
    written = [allocate(pieces, 0) for pieces in target.ranks]
    for bucket in plan.buckets:
        assert bucket.num_bytes <= bucket_bytes
        buffer = new_buffer(bucket.num_bytes).fill_(255)
        packed, sent = pack(bucket, sources[bucket.source_rank].__getitem__, buffer)
        assert sent == digest(packed)
        assert sent == unpack(bucket, packed, targets[bucket.target_rank].__getitem__)
        straight = [sources[bucket.source_rank].__getitem__, moved[bucket.target_rank].__getitem__]
        assert transfer(bucket, *straight, new_buffer(bucket.num_bytes).fill_(77)) == (sent, sent)
        for move in bucket.moves:
            region(written[bucket.target_rank][move.target_storage], move.target_box).add_(1)
    for rank, pieces in enumerate(target.ranks):
        for piece in pieces:
            seen = region(targets[rank][piece.storage], piece.storage_box)
            wanted = region(dense[piece.name], piece.box).reshape(seen.shape).to(seen.dtype)
            assert torch.equal(seen, wanted), piece
            assert torch.equal(region(moved[rank][piece.storage], piece.storage_box), wanted), piece
            assert (region(written[rank][piece.storage], piece.storage_box) == 1).all()
    pieces_bytes = sum(box_size(p.box) * DTYPE_BYTES[p.dtype] for pieces in target.ranks for p in pieces)
    assert plan.payload_bytes() == pieces_bytes
    own = 0
    for pieces, held in zip(target.ranks, source.ranks if colocated else (), strict=False):
        for wanted in pieces:
            mask = torch.zeros(wanted.shape)
            for piece in held:
                if piece.name == wanted.name:
                    region(mask, piece.box).fill_(1)
            own += int(region(mask, wanted.box).sum()) * DTYPE_BYTES[wanted.dtype]
    assert plan.payload_bytes(between_processes=True) == pieces_bytes - own


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_plan_is_the_same_each_time_and_rounds_fit_every_rank(case):
    _, source, target, bucket_bytes, colocated = case
    plan = make_plan(source, target, bucket_bytes=bucket_bytes, colocated=colocated)
    assert plan == make_plan(source, target, bucket_bytes=bucket_bytes, colocated=colocated)
    used, pairs = {}, set()
    for bucket in plan.buckets:
        pair = (bucket.round, bucket.source_rank, bucket.target_rank)
        assert pair not in pairs
        pairs.add(pair)
        for end in (("source", bucket.source_rank), ("target", bucket.target_rank)):
            used[bucket.round, end] = used.get((bucket.round, end), 0) + bucket.num_bytes
    assert all(num_bytes <= bucket_bytes for num_bytes in used.values())
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    assert [bucket.round for bucket in plan.buckets] == sorted(bucket.round for bucket in plan.buckets)


def whole(name, shape, dtype="float32", storage=None):
    return Piece(name, shape, full_box(shape), storage or name, full_box(shape), dtype)


def one(*pieces):
    return Layout((tuple(pieces),))


def test_replicas_share_the_load():
    pieces = tuple(whole(f"layers.{layer}.w", (16, 16)) for layer in range(8))
    plan = make_plan(Layout((pieces, pieces)), Layout((pieces, pieces)), bucket_bytes=4096)
    sent = [sum(b.num_bytes for b in plan.buckets if b.source_rank == rank) for rank in (0, 1)]
    assert sent[0] == sent[1] == 8 * 16 * 16 * 4


def test_own_pieces_come_first_where_the_sides_share_processes():
    pieces = tuple(whole(f"layers.{layer}.w", (16, 16)) for layer in range(8))
    plan = make_plan(Layout((pieces, pieces)), Layout((pieces, pieces)), bucket_bytes=4096, colocated=True)
    assert all(bucket.source_rank == bucket.target_rank for bucket in plan.buckets)
    assert plan.payload_bytes(between_processes=True) == 0


def test_large_tensors_are_split_and_buckets_are_well_filled():
    shapes = {"embed.weight": (1000, 64)} | {f"layers.{i}.w": (100, 64) for i in range(6)}
    layout = one(*(whole(name, shape) for name, shape in shapes.items()))
    plan = make_plan(layout, layout, bucket_bytes=32 << 10)
    assert sum(prod(shape) for shape in shapes.values()) * 4 == plan.payload_bytes()
    assert all(move.num_bytes <= 4 << 10 for bucket in plan.buckets for move in bucket.moves)
    assert len(plan.buckets) <= 1.15 * plan.payload_bytes() / (32 << 10) + 1


def test_buckets_end_at_layers_where_that_costs_little():
    layout = one(*(whole(f"layers.{layer}.{part}", (16, 16)) for layer in range(5) for part in "abc"))
    plan = make_plan(layout, layout, bucket_bytes=4 << 10)
    layers = [{layer_of(move.name) for move in bucket.moves} for bucket in plan.buckets]
    assert layers == [{f"layers.{layer}"} for layer in range(5)]


def test_the_order_is_the_targets():
    names = ["head", "layers.1.w", "layers.0.w", "embed"]
    target = one(*(whole(name, (4, 4)) for name in names))
    source = one(*(whole(name, (4, 4)) for name in sorted(names)))
    plan = make_plan(source, target, bucket_bytes=1 << 20)
    assert [move.name for bucket in plan.buckets for move in bucket.moves] == names


def test_two_layouts_have_two_keys():
    a = one(whole("w", (4, 4)), whole("v", (4, 4)))
    b = one(whole("v", (4, 4)), whole("w", (4, 4)))
    assert make_plan(a, a, bucket_bytes=256).key != make_plan(a, b, bucket_bytes=256).key


W = whole("w", (4, 2))
BAD = {
    "in no source piece": (one(whole("v", (4, 2))), one(W)),
    "no target piece takes tensor 'v'": (one(W, whole("v", (2,))), one(W)),
    "has shape (4, 2) in the source but (2, 4) in the target": (one(W), one(whole("w", (2, 4)))),
    "no source rank holds its box ((2, 4), (0, 2))": (
        one(Piece("w", (4, 2), ((0, 2), (0, 2)), "w", ((0, 2), (0, 2)), "float32")),
        one(W),
    ),
    "the target has no place for its box ((0, 1), (0, 2))": (
        one(W),
        one(Piece("w", (4, 2), ((1, 4), (0, 2)), "w", ((0, 3), (0, 2)), "float32")),
    ),
    "overlap in the target's storage 'fused'": (
        one(W, whole("v", (4, 2))),
        one(
            Piece("w", (4, 2), full_box((4, 2)), "fused", ((0, 4), (0, 2)), "float32"),
            Piece("v", (4, 2), full_box((4, 2)), "fused", ((3, 7), (0, 2)), "float32"),
        ),
    ),
    "'w' and 'w' overlap": (one(W), one(W, W)),
    "makes no sense": (one(Piece("w", (4, 2), ((0, 4), (0, 2)), "w", ((0, 3), (0, 2)), "float32")), one(W)),
    "two shapes in the source layout": (one(W, whole("w", (2, 2), storage="x")), one(W)),
}


@pytest.mark.parametrize("words", BAD)
def test_layouts_that_do_not_fit_are_refused_by_name(words):
    source, target = BAD[words]
    with pytest.raises(UserError) as caught:
        make_plan(source, target, bucket_bytes=1024)
    assert words in str(caught.value)
    assert "'w'" in str(caught.value) or "'v'" in str(caught.value)


def test_a_bucket_must_hold_something():
    with pytest.raises(UserError, match="bucket_bytes 3 is too small"):
        make_plan(one(W), one(W), bucket_bytes=3)
