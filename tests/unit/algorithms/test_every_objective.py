"""What holds for every policy loss, pair loss, correction and KL estimator of the tables, alone and together."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.algorithms.batches import (
    EVERY,
    FLOATS,
    JUNK,
    Totals,
    changed,
    draw,
    fitted,
    run,
    select,
    spoiled,
    totals_of,
)
from tranship.algorithms import CORRECTIONS, LOSSES
from tranship.algorithms.objective import make_loss
from tranship.config.schema import AlgorithmConfig, CorrectionConfig

few = settings(max_examples=10, deadline=None)
every = pytest.mark.parametrize("algorithm", EVERY.values(), ids=EVERY.keys())


def made(algorithm, seed, rows, tokens):
    return make_loss(algorithm), fitted(algorithm, draw(seed, rows, tokens, of_pairs=algorithm.flow == "dpo"))


@every
@few
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    tokens=st.integers(1, 9),
    junk=st.lists(st.sampled_from(JUNK), min_size=len(FLOATS), max_size=len(FLOATS)),
)
def test_masked_positions_never_matter(algorithm, seed, rows, tokens, junk):
    objective, batch = made(algorithm, seed, rows, tokens)
    loss, gradients, metrics = run(objective, batch)
    other_loss, other_gradients, other_metrics = run(objective, spoiled(batch, junk))
    assert torch.equal(loss, other_loss)
    assert torch.equal(gradients, other_gradients)
    assert metrics == other_metrics
    assert (gradients[:, ~batch.mask_BT] == 0).all()


@every
def test_a_nan_at_a_valid_position_is_never_hidden(algorithm):
    objective, batch = made(algorithm, 3, 4, 4)
    batch.mask_BT[:, 1] = True
    loss, _, _ = run(objective, batch)
    for column in FLOATS:
        values = getattr(batch, column)
        if values is None:
            continue
        for row, token in batch.mask_BT.nonzero().tolist():
            here = torch.zeros_like(batch.mask_BT)
            here[row, token] = True
            moved = changed(batch, column, here, float(values[row, token]) * 1.01)
            if column == "logprobs_BT" or not torch.equal(run(objective, moved)[0], loss):
                assert is_seen(objective, changed(batch, column, here, float("nan"))), (column, row, token)


def is_seen(objective, batch):
    try:
        return bool(run(objective, batch)[0].isnan())
    except AssertionError:
        return True


@every
@few
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 6), tokens=st.integers(1, 9), data=st.data())
def test_row_order_never_matters(algorithm, seed, rows, tokens, data):
    objective, batch = made(algorithm, seed, rows, tokens)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    loss, gradients, metrics = run(objective, batch)
    other_loss, other_gradients, other_metrics = run(objective, select(batch, order))
    torch.testing.assert_close(other_loss, loss, rtol=1e-5, atol=1e-6)
    assert torch.equal(other_gradients, gradients[:, order])
    assert_same_metrics(other_metrics, metrics)


@every
@few
@given(seed=st.integers(0, 2**31), rows=st.integers(2, 8), tokens=st.integers(1, 9), data=st.data())
def test_microbatches_add_up_to_the_whole(algorithm, seed, rows, tokens, data):
    objective, batch = made(algorithm, seed, rows, tokens)
    units = [torch.tensor([row]) for row in range(rows)]
    if objective.whole_groups:
        units = [(batch.group_B == group).nonzero().squeeze(-1) for group in batch.group_B.unique()]
    cut = data.draw(st.integers(0, len(units)))
    parts = [torch.cat(part) for part in (units[:cut], units[cut:]) if part]
    loss, gradients, metrics = run(objective, batch)
    found = [run(objective, select(batch, part), totals_of(batch)) for part in parts]
    torch.testing.assert_close(sum(part[0] for part in found), loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([part[1] for part in found], 1), gradients, rtol=1e-6, atol=1e-8)
    added = {}
    for _, _, of_part in found:
        for name, (total, weight) in of_part.items():
            before = added.get(name, (0.0, 0.0))
            added[name] = before[0] + total, before[1] + weight
    assert_same_metrics(added, metrics)


@every
def test_a_batch_without_unmasked_tokens_gives_zero(algorithm):
    objective, batch = made(algorithm, 1, 4, 3)
    batch.mask_BT[:] = False
    batch = spoiled(batch, [float("nan")] * len(FLOATS))
    loss, gradients, metrics = run(objective, batch, Totals(0, 0))
    assert loss == 0
    assert (gradients == 0).all()
    assert all(value == (0.0, 0.0) for value in metrics.values()), metrics


@every
@few
@given(seed=st.integers(0, 2**31), data=st.data())
def test_policies_far_apart_give_finite_numbers(algorithm, seed, data):
    objective, batch = made(algorithm, seed, 4, 5)
    for column in ("logprobs_BT", "old_logprobs_BT", "ref_logprobs_BT", "proximal_logprobs_BT"):
        if getattr(batch, column) is not None:
            far = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 1e4, -1e4]), min_size=20, max_size=20)))
            setattr(batch, column, getattr(batch, column) + far.view(4, 5))
    loss, gradients, metrics = run(objective, batch)
    assert torch.isfinite(loss)
    assert torch.isfinite(gradients).all()
    assert all(math.isfinite(total) for total, _ in metrics.values()), metrics


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "sft"])
def test_a_correction_changes_no_bit_where_the_policies_are_the_same(loss, correction):
    plain = AlgorithmConfig(loss=loss)
    corrected = AlgorithmConfig(loss=loss, correction=CorrectionConfig(name=correction))
    batch = draw(5, 4, 8)
    batch.proximal_logprobs_BT = batch.old_logprobs_BT.clone()
    without, with_it = run(make_loss(plain), fitted(plain, batch)), run(make_loss(corrected), batch)
    assert torch.equal(without[0], with_it[0])
    assert torch.equal(without[1], with_it[1])
    total, weight = with_it[2]["correction_weight_mean"]
    assert total == weight == batch.mask_BT.sum()


def assert_same_metrics(seen, expected):
    assert seen.keys() == expected.keys()
    for name, value in expected.items():
        assert seen[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name
