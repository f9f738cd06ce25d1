from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.algorithms.batches import JUNK, Totals
from tranship.algorithms.objective import make_value_loss
from tranship.config.schema import CriticConfig

NAMES = ("values_BT", "old_values_BT", "returns_BT")
CLIPS = pytest.mark.parametrize("clip", [0.2, None])
few = settings(max_examples=25, deadline=None)


@dataclass
class Values:
    values_BT: torch.Tensor
    old_values_BT: torch.Tensor
    returns_BT: torch.Tensor
    mask_BT: torch.Tensor

    def rows(self, order):
        return Values(*(getattr(self, name)[order] for name in (*NAMES, "mask_BT")))


def run(batch, clip, totals=None):
    batch = batch.rows(slice(None))
    batch.values_BT = batch.values_BT.clone().requires_grad_()
    totals = totals or Totals(int(batch.mask_BT.sum()), int(batch.mask_BT.any(-1).sum()))
    loss, metrics = make_value_loss(CriticConfig(value_clip=clip))(batch, totals)
    loss.backward()
    return loss.detach(), batch.values_BT.grad, metrics


def draw(seed, rows, tokens):
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randn(rows, tokens, generator=generator) for _ in NAMES]
    return Values(*columns, torch.rand(rows, tokens, generator=generator) < 0.6)


def at(value, old, target, clip):
    one = torch.ones(1, 1)
    return run(Values(one * value, one * old, one * target, one.bool()), clip)


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "gradient", "clipped"),
    [
        (2.0, 1.0, 0.0, 0.2, 2.0, 2.0, 0),
        (2.0, 1.0, 2.0, 0.2, 0.32, 0.0, 1),
        (2.0, 1.0, 2.0, None, 0.0, 0.0, 0),
        (1.1, 1.0, 2.0, 0.2, 0.405, -0.9, 0),
        (0.0, 1.0, -1.0, 0.2, 1.62, 0.0, 1),
    ],
)
def test_value_loss_has_a_half_and_bounds_the_move(value, old, target, clip, loss, gradient, clipped):
    seen, seen_gradient, metrics = at(value, old, target, clip)
    assert seen.item() == pytest.approx(loss, abs=1e-6)
    assert seen_gradient.item() == pytest.approx(gradient, abs=1e-6)
    assert metrics["value_clip_frac"] == (clipped, 1)
    assert metrics["value_loss"] == pytest.approx((loss, 1), abs=1e-6)


def test_a_move_within_the_bound_is_never_clipped_by_rounding():
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (torch.rand(8, 512, generator=generator) * 0.19 for _ in range(3))
    batch = Values(values, old, returns, torch.ones(8, 512, dtype=torch.bool))
    clipped, free = run(batch, 0.2), run(batch, None)
    assert clipped[2] == free[2]
    assert torch.equal(clipped[1], free[1])


@CLIPS
@few
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    tokens=st.integers(1, 9),
    junk=st.lists(st.sampled_from(JUNK), min_size=3, max_size=3),
)
def test_masked_positions_never_matter(clip, seed, rows, tokens, junk):
    batch = draw(seed, rows, tokens)
    loss, gradient, metrics = run(batch, clip)
    spoiled = [getattr(batch, name).masked_fill(~batch.mask_BT, value) for name, value in zip(NAMES, junk, strict=True)]
    other_loss, other_gradient, other_metrics = run(Values(*spoiled, batch.mask_BT), clip)
    assert torch.equal(loss, other_loss)
    assert torch.equal(gradient, other_gradient)
    assert metrics == other_metrics


@CLIPS
@few
@given(seed=st.integers(0, 2**31), rows=st.integers(2, 6), tokens=st.integers(1, 9), data=st.data())
def test_row_order_and_microbatches_never_matter(clip, seed, rows, tokens, data):
    batch = draw(seed, rows, tokens)
    loss, gradient, metrics = run(batch, clip)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    cut = data.draw(st.integers(1, rows - 1))
    totals = Totals(int(batch.mask_BT.sum()), int(batch.mask_BT.any(-1).sum()))
    parts = [run(batch.rows(part), clip, totals) for part in (order[:cut], order[cut:])]
    torch.testing.assert_close(parts[0][0] + parts[1][0], loss, rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.cat([part[1] for part in parts]), gradient[order])
    for name, (total, weight) in metrics.items():
        added = [sum(part[2][name][i] for part in parts) for i in range(2)]
        assert added == pytest.approx([total, weight], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("clip", "name"), [*((0.2, name) for name in NAMES), (None, "values_BT"), (None, "returns_BT")]
)
def test_a_nan_at_a_valid_position_is_never_hidden(clip, name):
    batch = draw(3, 2, 4)
    batch.mask_BT[0, 1] = True
    getattr(batch, name)[0, 1] = float("nan")
    assert run(batch, clip)[0].isnan()


@CLIPS
def test_a_batch_without_unmasked_tokens_gives_zero(clip):
    batch = Values(*(torch.full((2, 3), float("nan")) for _ in NAMES), torch.zeros(2, 3, dtype=torch.bool))
    loss, gradient, metrics = run(batch, clip, Totals(0, 0))
    assert loss == 0
    assert (gradient == 0).all()
    assert all(value == (0.0, 0.0) for value in metrics.values())


def test_metrics_give_the_explained_variance():
    batch = draw(7, 4, 8)
    _, _, metrics = run(batch, 0.2)
    means = {name: total / weight for name, (total, weight) in metrics.items()}
    error = means["value_error_square"] - (means["return_mean"] - means["value_mean"]) ** 2
    spread = means["return_square"] - means["return_mean"] ** 2
    values, returns = batch.values_BT[batch.mask_BT], batch.returns_BT[batch.mask_BT]
    assert 1 - error / spread == pytest.approx(1 - float((returns - values).var() / returns.var()), rel=1e-4)
