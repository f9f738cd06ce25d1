import pytest
import torch

from tranship.config.schema import OptimizerConfig
from tranship.train.optim import apply_gradients, learning_rate, make_optimizer
from tranship.types import RunError


def rates(schedule, batches=10, warmup=0, bottom=0.0):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=warmup, min_learning_rate=bottom)
    return [learning_rate(config, batch, batches) for batch in range(batches + 1)]


def test_constant_stays():
    assert rates("constant") == [1.0] * 11


def test_warmup_rises_to_the_top_and_then_the_schedule_begins():
    assert rates("constant", warmup=4)[:6] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert rates("linear", warmup=4, bottom=0.1)[4] == 1


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_falling_schedule_ends_at_the_least_rate(schedule):
    values = rates(schedule, bottom=0.1)
    assert values[0] == 1
    assert values[5] == pytest.approx(0.55)
    assert values[10] == pytest.approx(0.1)
    assert values == sorted(values, reverse=True)


def test_a_warmup_longer_than_the_run_is_no_division_by_zero():
    assert rates("cosine", batches=2, warmup=5) == [0.2, 0.4, pytest.approx(0.6)]


def parameter(gradient):
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor(gradient)
    return {"weight": p}


def step(parameters, max_norm, fence=lambda: None):
    optimizer = make_optimizer(parameters, OptimizerConfig())
    return apply_gradients(optimizer, parameters, rate=0.1, max_norm=max_norm, fence=fence)


@pytest.mark.parametrize(("max_norm", "scale"), [(1.0, 0.2), (10.0, 1.0), (None, 1.0)])
def test_clipping_scales_to_the_norm_and_reports_the_one_before(max_norm, scale):
    parameters = parameter([3.0, 4.0])
    assert step(parameters, max_norm) == pytest.approx(5)
    torch.testing.assert_close(parameters["weight"].grad, scale * torch.tensor([3.0, 4.0]), rtol=1e-5, atol=0)
    torch.testing.assert_close(parameters["weight"].detach(), torch.tensor([-0.1, -0.1]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    parameters = parameter([bad, 3e38])
    with pytest.raises(RunError, match=r"weight|overflows"):
        step(parameters, 1.0)
    assert (parameters["weight"] == 0).all()


def test_the_fence_is_the_last_thing_before_the_step():
    def closed():
        raise LookupError

    parameters = parameter([1.0, 1.0])
    with pytest.raises(LookupError):
        step(parameters, 1.0, closed)
    assert (parameters["weight"] == 0).all()
