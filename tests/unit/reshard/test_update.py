"""Versions arrive whole and right, or are refused: two ends over real storages, and everything that can go wrong."""

import warnings
import weakref

import numpy as np
import pytest
import torch

from tranship.layouts import Layout, Piece, full_box
from tranship.reshard import Announcement, Manifest, WeightSink, WeightSource, check_landed, make_plan
from tranship.types import RunError

torch.set_num_threads(1)
SHAPES = {"embed": (50, 8), "layers.0.q": (8, 8), "layers.0.k": (4, 8), "layers.1.q": (8, 8), "layers.1.k": (4, 8)}


def train_pieces():
    return tuple(
        Piece(name, shape, full_box(shape), name, full_box(shape), "float32") for name, shape in SHAPES.items()
    )


def engine_pieces(dtype):
    """q and k of a layer fused; the embedding alone (its tied head is no tensor of its own)."""
    pieces = [Piece("embed", (50, 8), full_box((50, 8)), "table", full_box((50, 8)), dtype)]
    for layer in (0, 1):
        for name, (start, stop) in {"q": (0, 8), "k": (8, 12)}.items():
            shape = (stop - start, 8)
            place = ((start, stop), (0, 8))
            pieces.append(Piece(f"layers.{layer}.{name}", shape, full_box(shape), f"qk{layer}", place, dtype))
    return tuple(pieces)


class Ends:
    """A source and a sink of one small model, with a store between them."""

    def __init__(self, dtype="float32", bucket_bytes=512):
        self.weights = {name: torch.randn(shape).requires_grad_() for name, shape in SHAPES.items()}
        kind = getattr(torch, dtype)
        self.engine = {"table": torch.zeros(50, 8, dtype=kind)} | {
            f"qk{i}": torch.zeros(12, 8, dtype=kind) for i in (0, 1)
        }
        self.plan = make_plan(
            Layout((train_pieces(),)), Layout((engine_pieces(dtype),)), bucket_bytes=bucket_bytes, colocated=True
        )
        self.source = WeightSource(self.plan, self.weights.__getitem__)
        self.sink = WeightSink(self.plan, self.engine.__getitem__)

    def put(self, array):
        kept = array.copy()
        kept.flags.writeable = False
        return kept

    def get(self, ref):
        return ref

    def train(self):
        with torch.no_grad():
            for weight in self.weights.values():
                weight.add_(torch.randn(weight.shape))

    def arrived(self):
        kind = self.engine["table"].dtype
        wanted = {"table": self.weights["embed"]}
        wanted |= {f"qk{i}": torch.cat([self.weights[f"layers.{i}.q"], self.weights[f"layers.{i}.k"]]) for i in (0, 1)}
        return all(torch.equal(self.engine[name], tensor.to(kind)) for name, tensor in wanted.items())


@pytest.fixture(params=["float32", "bfloat16"])
def ends(request):
    return Ends(request.param)


def test_versions_are_pulled_one_after_the_other(ends):
    assert ends.sink.version is None
    for version in (1, 2):
        ends.train()
        announcement = ends.source.publish(version, ends.put)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ends.sink.pull([announcement], ends.get) == version
        assert ends.sink.version == version
        assert ends.arrived()


def test_a_sink_that_missed_versions_takes_the_newest(ends):
    announcements = []
    for version in (1, 2, 3, 4):
        ends.train()
        announcements.append(ends.source.publish(version, ends.put))
    ends.sink.pull(announcements[:1], ends.get)
    assert not ends.arrived()
    assert ends.sink.pull(announcements[3:], ends.get) == 4
    assert ends.arrived()


def test_published_buckets_do_not_change_with_the_weights(ends):
    announcement = ends.source.publish(1, ends.put)
    kept = {name: weight.detach().clone() for name, weight in ends.weights.items()}
    ends.train()
    ends.sink.pull([announcement], ends.get)
    assert not ends.arrived()
    ends.weights = kept
    assert ends.arrived()


def test_versions_only_grow(ends):
    ends.source.publish(3, ends.put)
    for version in (3, 2):
        with pytest.raises(RunError, match=f"version {version} cannot be published after version 3"):
            ends.source.publish(version, ends.put)


def test_a_push_writes_and_verifies(ends):
    for version in (1, 2):
        ends.train()
        manifest = ends.source.push(version, ends.engine.__getitem__)
        assert manifest.version == version
        assert ends.arrived()
        assert manifest.digests == ends.source.publish(version, ends.put).manifest.digests


@pytest.mark.parametrize("storage", ["table", "qk1"])
def test_a_target_that_hands_out_copies_is_refused(ends, storage):
    def lend(name):
        return ends.engine[name].clone() if name == storage else ends.engine[name]

    with pytest.raises(RunError, match=r"version 5, bucket \d+ arrived damaged .* the version is refused"):
        ends.source.push(5, lend)


def test_a_look_at_what_landed_finds_later_writes_and_shared_memory(ends):
    manifest = ends.source.push(1, ends.engine.__getitem__)
    check_landed(ends.plan, manifest, ends.engine.__getitem__)
    announcement = ends.source.publish(2, ends.put)
    ends.sink.pull([announcement], ends.get)
    check_landed(ends.plan, announcement.manifest, ends.engine.__getitem__)
    ends.engine["qk1"][11, 7] += 1
    with pytest.raises(RunError, match=r"arrived damaged .*layers.1.k"):
        check_landed(ends.plan, announcement.manifest, ends.engine.__getitem__)
    ends.engine["qk1"] = ends.engine["qk0"]
    ends.sink.pull([announcement], ends.get)
    with pytest.raises(RunError, match=r"arrived damaged .*layers.0"):
        check_landed(ends.plan, announcement.manifest, ends.engine.__getitem__)


def published(ends, version=7):
    ends.train()
    return ends.source.publish(version, ends.put)


def changed(announcement, refs=None, digests=None):
    manifest = announcement.manifest
    return Announcement(
        announcement.version,
        Manifest(manifest.version, manifest.plan_key, manifest.digests if digests is None else digests),
        announcement.refs if refs is None else refs,
    )


def refused(ends, announcements, words):
    """The pull is refused with these words, and the sink takes the next good version."""
    good = ends.source.publish(8, ends.put)
    with pytest.raises(RunError, match=words):
        ends.sink.pull(announcements, ends.get)
    assert ends.sink.pull([good], ends.get) == 8
    assert ends.arrived()


def test_a_refused_version_takes_the_old_one_with_it_but_a_refused_announcement_does_not(ends):
    old = published(ends, 6)
    ends.sink.pull([old], ends.get)
    with pytest.raises(RunError, match="announced twice"):
        ends.sink.pull([old, old], ends.get)
    assert ends.sink.version == 6
    new = published(ends, 7)
    last = max(new.refs)
    with pytest.raises(RunError, match="incomplete"):
        ends.sink.pull([changed(new, refs={i: ref for i, ref in new.refs.items() if i != last})], ends.get)
    assert ends.sink.version is None


def test_every_flipped_byte_is_found(ends):
    announcement = published(ends)
    for index, ref in announcement.refs.items():
        for position in (0, len(ref) // 2, len(ref) - 1):
            broken = ref.copy()
            broken[position] ^= 1
            with pytest.raises(RunError, match=rf"version 7, bucket {index} arrived damaged .*; it holds "):
                ends.sink.pull([changed(announcement, refs={**announcement.refs, index: broken})], ends.get)
            assert ends.sink.version is None
    refused(ends, [changed(announcement, refs={**announcement.refs, 0: announcement.refs[0][::-1].copy()})], "damaged")


def test_two_buckets_that_change_places_are_found(ends):
    announcement = published(ends)
    sizes = {}
    for index, ref in announcement.refs.items():
        sizes.setdefault(len(ref), []).append(index)
    a, b = next(indices[:2] for indices in sizes.values() if len(indices) > 1)
    swapped = {**announcement.refs, a: announcement.refs[b], b: announcement.refs[a]}
    refused(ends, [changed(announcement, refs=swapped)], f"bucket {a} arrived damaged")


def test_a_dropped_bucket_is_named(ends):
    announcement = published(ends)
    last = max(announcement.refs)
    refs = {index: ref for index, ref in announcement.refs.items() if index != last}
    refused(
        ends,
        [changed(announcement, refs=refs)],
        f"version 7 is incomplete: 1 buckets .* the first is {last} with layers.1",
    )


def test_a_bucket_without_a_digest_is_refused(ends):
    announcement = published(ends)
    digests = {index: value for index, value in announcement.manifest.digests.items() if index != 1}
    refused(ends, [changed(announcement, digests=digests)], "version 7, bucket 1 was not announced")


def test_a_shortened_bucket_is_refused(ends):
    announcement = published(ends)
    refs = {**announcement.refs, 0: announcement.refs[0][:-1]}
    refused(ends, [changed(announcement, refs=refs)], r"version 7, bucket 0 has \d+ bytes, not \d+")


def test_a_bucket_that_is_announced_twice_is_refused(ends):
    announcement = published(ends)
    refused(ends, [announcement, announcement], "version 7, bucket 0 was announced twice")


def test_a_mixture_of_versions_is_refused(ends):
    old, new = published(ends, 6), published(ends, 7)
    halves = [
        changed(part, refs={index: ref for index, ref in part.refs.items() if index % 2 == keep})
        for part, keep in ((old, 0), (new, 1))
    ]
    refused(ends, halves, "announced versions 6 and 7")


def test_a_bucket_of_an_older_version_is_found(ends):
    old, new = published(ends, 6), published(ends, 7)
    refused(ends, [changed(new, refs={**new.refs, 0: old.refs[0]})], "version 7, bucket 0 arrived damaged")


def test_ends_with_different_plans_do_not_talk(ends):
    other = Ends(str(ends.engine["table"].dtype).removeprefix("torch."), bucket_bytes=1024)
    refused(ends, [published(other)], "different layouts")


def test_two_source_ranks_make_one_version():
    pieces = train_pieces()
    source = Layout((pieces[:2], pieces[2:]))
    ends = Ends()
    plan = make_plan(source, Layout((engine_pieces("float32"),)), bucket_bytes=512)
    sources = [WeightSource(plan, ends.weights.__getitem__, rank) for rank in (0, 1)]
    sink = WeightSink(plan, ends.engine.__getitem__)
    parts = [source.publish(1, ends.put) for source in sources]
    with pytest.raises(RunError, match="version 1 is incomplete"):
        sink.pull(parts[:1], ends.get)
    assert sink.pull(parts, ends.get) == 1
    assert ends.arrived()


def test_two_target_ranks_each_take_their_own():
    ends = Ends()
    pieces = engine_pieces("float32")
    plan = make_plan(Layout((train_pieces(),)), Layout((pieces[:3], pieces[3:])), bucket_bytes=512)
    announcement = WeightSource(plan, ends.weights.__getitem__).publish(4, ends.put)
    for rank in (0, 1):
        assert not ends.arrived()
        assert WeightSink(plan, ends.engine.__getitem__, rank).pull([announcement], ends.get) == 4
    assert ends.arrived()


def test_the_last_two_versions_are_kept_alive(ends):
    class Ref:
        def __init__(self, array):
            self.array = array.copy()

    alive = []

    def put(array):
        ref = Ref(array)
        alive.append(weakref.ref(ref))
        return ref

    for version in (1, 2, 3):
        ends.source.publish(version, put)
    count = len(ends.plan.buckets)
    assert [ref() is not None for ref in alive] == [False] * count + [True] * 2 * count


def test_arrays_from_a_store_are_not_written_to(ends):
    announcement = published(ends)
    before = {index: ref.copy() for index, ref in announcement.refs.items()}
    ends.sink.pull([announcement], ends.get)
    assert all(np.array_equal(before[index], ref) for index, ref in announcement.refs.items())
