"""Probes: the sampler's log-probs must be the trainer's, within what the dtype allows."""

import numpy as np
import pytest

from tranship.layouts import Layout, Piece, full_box
from tranship.reshard import Arrival, Manifest, check_probe, make_plan
from tranship.types import RunError

TRAINER = np.linspace(-8, -0.01, 40).astype(np.float32)


def test_a_probe_within_the_tolerance_gives_its_gap():
    gap = check_probe(3, TRAINER, TRAINER + np.float32(1e-5), "fp32")
    assert gap.mean == pytest.approx(1e-5, rel=0.1)
    assert check_probe(3, TRAINER, TRAINER, "fp32").largest == 0
    noisy = TRAINER + np.random.default_rng(0).normal(0, 0.02, 40).astype(np.float32)
    assert 0.005 < check_probe(3, TRAINER, noisy, "bf16").mean < 0.03


@pytest.mark.parametrize(("dtype", "gap"), [("fp32", 1e-3), ("bf16", 0.2)])
def test_a_gap_beyond_the_tolerance_names_version_gap_and_tolerance(dtype, gap):
    with pytest.raises(RunError, match=rf"version 3: .*gap {gap:.2g} .*40 tokens, tolerance in {dtype}"):
        check_probe(3, TRAINER, TRAINER + np.float32(gap), dtype)


def test_one_token_far_off_is_enough():
    sampler = TRAINER.copy()
    sampler[17] -= 0.005
    with pytest.raises(RunError, match=r"0\.005 at most"):
        check_probe(3, TRAINER, sampler, "fp32")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused(value):
    sampler = TRAINER.copy()
    sampler[5] = value
    with pytest.raises(RunError, match="version 3"):
        check_probe(3, TRAINER, sampler, "bf16")


def test_a_bucket_counts_once():
    layout = Layout(((Piece("w", (4, 4), full_box((4, 4)), "w", full_box((4, 4)), "float32"),),))
    plan = make_plan(layout, layout, bucket_bytes=64)
    arrival = Arrival(plan, Manifest(2, plan.key, {0: "a"}), 0)
    with pytest.raises(RunError, match=r"version 2, bucket 0 arrived damaged .*it holds w"):
        arrival.accept(plan.buckets[0], "b")
    arrival.accept(plan.buckets[0], "a")
    with pytest.raises(RunError, match="version 2, bucket 0 arrived twice"):
        arrival.accept(plan.buckets[0], "a")
    assert arrival.complete() == 2
