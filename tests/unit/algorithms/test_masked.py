import pytest
import torch

from tranship.algorithms.masked import masked_mean, masked_sum, metric

VALUES = torch.tensor([[1.0, 2, float("nan")], [float("inf"), -float("inf"), float("nan")]])
MASK = torch.tensor([[True, True, False], [False, False, False]])


def test_entries_outside_the_mask_are_not_there():
    assert masked_sum(VALUES, MASK).item() == 3
    assert masked_mean(VALUES, MASK).item() == 1.5
    assert masked_sum(VALUES, MASK, dim=-1).tolist() == [3, 0]
    assert masked_mean(VALUES, MASK, dim=-1).tolist() == [1.5, 0]
    assert metric(VALUES, MASK) == (3.0, 2.0)


@pytest.mark.parametrize("reduce", [masked_sum, masked_mean])
@pytest.mark.parametrize("dim", [None, -1])
def test_no_gradient_reaches_entries_outside_the_mask(reduce, dim):
    values = VALUES.clone().requires_grad_()
    reduce(values, MASK, dim).sum().backward()
    assert values.grad is not None
    assert torch.isfinite(values.grad).all()
    assert (values.grad[~MASK] == 0).all()
    assert (values.grad[MASK] > 0).all()


def test_a_nan_inside_the_mask_is_not_hidden():
    mask = torch.ones_like(MASK)
    assert masked_sum(VALUES, mask).isnan()
    assert masked_mean(VALUES, mask, dim=-1).isnan().all()
