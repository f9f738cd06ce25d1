from dataclasses import dataclass

import pytest
import torch

from tranship.algorithms.objective import make_loss
from tranship.config.schema import AlgorithmConfig, KlConfig
from tranship.types import UserError


@dataclass
class Inputs:
    logprobs_BT: torch.Tensor
    old_logprobs_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    ref_logprobs_BT: torch.Tensor | None = None
    proximal_logprobs_BT: torch.Tensor | None = None


@dataclass(frozen=True)
class StepTotals:
    num_tokens: int
    num_sequences: int
    max_response_tokens: int = 8


def inputs(with_reference):
    generator = torch.Generator().manual_seed(1)
    logprobs, old, advantages, ref = (torch.randn(3, 8, generator=generator) for _ in range(4))
    mask = torch.rand(3, 8, generator=generator) < 0.7
    return Inputs(logprobs.requires_grad_(), old, advantages, mask, ref if with_reference else None)


def run(algorithm, batch):
    totals = StepTotals(int(batch.mask_BT.sum()), int(batch.mask_BT.any(-1).sum()))
    loss, metrics = make_loss(algorithm)(batch, totals)
    loss.backward()
    return loss.detach(), batch.logprobs_BT.grad, metrics


def test_kl_coefficient_zero_is_bit_equal_to_having_no_reference():
    plain = run(AlgorithmConfig(), inputs(False))
    poisoned = inputs(True)
    poisoned.ref_logprobs_BT = torch.full((3, 8), float("nan"))
    off = run(AlgorithmConfig(kl=KlConfig(coef=0.0)), poisoned)
    assert torch.equal(plain[0], off[0])
    assert torch.equal(plain[1], off[1])
    assert plain[2] == off[2]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_kl_adds_its_aggregated_mean_times_the_coefficient(estimator, mode):
    plain = run(AlgorithmConfig(aggregation=mode), inputs(True))
    one, two = (
        run(AlgorithmConfig(aggregation=mode, kl=KlConfig(coef=c, estimator=estimator)), inputs(True))
        for c in (0.1, 0.2)
    )
    torch.testing.assert_close(two[0] - plain[0], 2 * (one[0] - plain[0]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(two[1] - plain[1], 2 * (one[1] - plain[1]), atol=1e-5, rtol=1e-4)
    total, weight = one[2]["kl"]
    if mode == "token-mean":
        assert (one[0] - plain[0]).item() == pytest.approx(0.1 * total / weight, abs=1e-5)


@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_masked_positions_never_matter(junk):
    algorithm = AlgorithmConfig(kl=KlConfig(coef=0.5), dual_clip=3.0)
    plain = run(algorithm, inputs(True))
    spoiled = inputs(True)
    for name in ("logprobs_BT", "old_logprobs_BT", "advantages_BT", "ref_logprobs_BT"):
        value = getattr(spoiled, name).detach().masked_fill(~spoiled.mask_BT, junk)
        setattr(spoiled, name, value.requires_grad_(name == "logprobs_BT"))
    other = run(algorithm, spoiled)
    assert torch.equal(plain[0], other[0])
    assert torch.equal(plain[1], other[1])
    assert plain[2] == other[2]


@pytest.mark.parametrize(
    ("algorithm", "setting"),
    [
        (AlgorithmConfig(loss="clipp"), "algorithm.loss"),
        (AlgorithmConfig(kl=KlConfig(coef=1.0, estimator="k9")), "algorithm.kl.estimator"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_setting(algorithm, setting):
    with pytest.raises(UserError, match=setting):
        make_loss(algorithm)
