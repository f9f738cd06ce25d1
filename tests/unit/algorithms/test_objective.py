from dataclasses import replace

import pytest
import torch

from tests.unit.algorithms.batches import draw, run
from tranship.algorithms.objective import make_loss
from tranship.config.presets import ALGORITHMS
from tranship.config.schema import AlgorithmConfig, CorrectionConfig, KlConfig
from tranship.types import UserError


def batch():
    return replace(draw(1, 3, 8), proximal_logprobs_BT=None)


def loss_of(**algorithm):
    return run(make_loss(AlgorithmConfig(**algorithm)), batch())


@pytest.mark.parametrize("kl", [KlConfig(coef=0.0), KlConfig(coef=0.5, where="reward")])
def test_a_kl_that_is_not_in_the_loss_is_bit_equal_to_having_no_reference(kl):
    plain = run(make_loss(AlgorithmConfig()), replace(batch(), ref_logprobs_BT=None))
    poisoned = replace(batch(), ref_logprobs_BT=torch.full((3, 8), float("nan")))
    off = run(make_loss(AlgorithmConfig(kl=kl)), poisoned)
    assert torch.equal(plain[0], off[0])
    assert torch.equal(plain[1], off[1])
    assert plain[2] == off[2]


MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("mode", MODES)
def test_kl_adds_its_aggregated_mean_times_the_coefficient(estimator, mode):
    plain = loss_of(aggregation=mode)
    one, two = (loss_of(aggregation=mode, kl=KlConfig(coef=c, estimator=estimator)) for c in (0.1, 0.2))
    torch.testing.assert_close(two[0] - plain[0], 2 * (one[0] - plain[0]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(two[1] - plain[1], 2 * (one[1] - plain[1]), atol=1e-5, rtol=1e-4)
    total, weight = one[2]["kl"]
    if mode == "token-mean":
        assert (one[0] - plain[0]).item() == pytest.approx(0.1 * total / weight, abs=1e-5)


def test_the_entropy_bonus_is_taken_off_as_the_loss_is_aggregated():
    plain, with_it = loss_of(), loss_of(entropy_coef=0.5)
    total, weight = with_it[2]["entropy"]
    assert weight == batch().mask_BT.sum()
    assert (with_it[0] - plain[0]).item() == pytest.approx(-0.5 * total / weight, abs=1e-5)
    assert torch.equal(with_it[1][0], plain[1][0])
    torch.testing.assert_close(with_it[1][1], -0.5 / weight * batch().mask_BT.float())
    assert "entropy" not in plain[2]


@pytest.mark.parametrize("mode", MODES)
def test_the_policy_term_is_told_apart_from_the_others(mode):
    plain, with_more = loss_of(aggregation=mode), loss_of(aggregation=mode, entropy_coef=0.5, kl=KlConfig(coef=0.1))
    assert with_more[2]["pg_loss"] == pytest.approx((plain[0].item(), 1.0), rel=1e-6)
    assert "pg_loss" not in plain[2]


def test_an_objective_says_what_it_needs():
    needs = {
        "grpo": make_loss(AlgorithmConfig()),
        "entropy": make_loss(AlgorithmConfig(entropy_coef=0.1)),
        "dpo": make_loss(AlgorithmConfig(name="dpo")),
    }
    assert {name: loss.needs_entropy for name, loss in needs.items()} == {"grpo": False, "entropy": True, "dpo": False}
    assert {name: loss.whole_groups for name, loss in needs.items()} == {"grpo": False, "entropy": False, "dpo": True}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_loss_as_its_preset_stands(name):
    make_loss(AlgorithmConfig(name=name))


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"loss": "clipp"}, "algorithm.loss.*clip"),
        ({"kl": KlConfig(coef=1.0, estimator="k9")}, "algorithm.kl.estimator"),
        ({"correction": CorrectionConfig(name="truncate")}, "algorithm.correction.name.*truncated_token"),
        ({"correction": CorrectionConfig(args={"cap": 2.0})}, "no correction is named"),
        ({"correction": CorrectionConfig(name="truncated_token", args={"low": 2.0})}, "takes no 'low'.*cap"),
        ({"correction": CorrectionConfig(name="truncated_token", args={"cap": "2"})}, "cap.*a number"),
        ({"correction": CorrectionConfig(name="truncated_token", args={"cap": 0.5})}, "cap is 0.5"),
        ({"loss_args": {"beta": 0.1}}, "algorithm.loss_args: 'clip' takes no 'beta'"),
        ({"loss_args": {"clip_low": 0.1}}, "'clip_low' is a setting of its own"),
        ({"name": "cispo", "loss_args": {"min_ratio": 3.0}}, "min_ratio"),
        ({"name": "cispo", "clip_low": 0.1}, "algorithm.clip_low is 0.1, but loss 'cispo'"),
        ({"name": "gspo", "dual_clip": 3.0}, "algorithm.dual_clip is 3.0, but loss 'gspo'"),
        ({"name": "reinforce", "clip_high": 0.3}, "algorithm.clip_high is 0.3, but loss 'reinforce'"),
        ({"name": "dpo", "clip_high": 0.3}, "algorithm.clip_high"),
        ({"loss": "dpo"}, "name=dpo"),
        ({"name": "dpo", "loss": "clip"}, "compares no pairs.*dpo, ipo"),
        ({"name": "dpo", "aggregation": "token-mean"}, "algorithm.aggregation has no meaning"),
        ({"name": "dpo", "kl": KlConfig(coef=0.1)}, "algorithm.kl.coef has no meaning"),
        ({"name": "dpo", "entropy_coef": 0.1}, "algorithm.entropy_coef has no meaning"),
        ({"name": "dpo", "loss_args": {"beta": -1.0}}, "beta of dpo is -1.0"),
        ({"name": "sft", "loss": "clip"}, "use loss=sft"),
        ({"loss": "sft"}, "loss=reinforce"),
    ],
)
def test_what_does_not_fit_or_would_do_nothing_is_refused(algorithm, said):
    with pytest.raises(UserError, match=said):
        make_loss(AlgorithmConfig(**algorithm))


def test_a_clip_that_a_preset_set_does_not_stand_in_the_way_of_another_loss():
    make_loss(AlgorithmConfig(name="dapo", loss="reinforce"))
    make_loss(AlgorithmConfig(name="gspo", loss="cispo"))


OUTSIDE = """
import torch

def loss(logprobs, old, advantages, mask, *, scale, clip_high):
    losses = torch.where(mask, -scale * clip_high * logprobs, 0.0)
    return losses, {"mine": (1.0, 2.0)}

def pair(chosen, rejected):
    return rejected - chosen, {}

def correction(behaviour, proximal, mask, *, weight=1.0):
    return torch.full_like(proximal, weight), mask, {}

def scalar(logprobs, old, advantages, mask):
    return logprobs.sum(), {}

def broken(logprobs, old, advantages, mask):
    return logprobs.no_such_thing(), {}

not_a_function = 3
"""


@pytest.fixture
def outside(tmp_path):
    (tmp_path / "mine.py").write_text(OUTSIDE)
    return f"{tmp_path}/mine.py"


def test_functions_from_a_file_are_used_by_name(outside):
    loss, _, metrics = loss_of(loss=f"{outside}:loss", loss_args={"scale": 2.0}, clip_high=0.5)
    mask = batch().mask_BT
    assert loss.item() == pytest.approx(-batch().logprobs_BT[mask].mean().item(), abs=1e-5)
    assert metrics["mine"] == (1.0, 2.0)
    paired, _, _ = run(make_loss(AlgorithmConfig(name="dpo", loss=f"{outside}:pair")), draw(2, 4, 8, of_pairs=True))
    assert paired != 0
    corrected = AlgorithmConfig(
        loss="reinforce", correction=CorrectionConfig(name=f"{outside}:correction", args={"weight": 3})
    )
    torch.testing.assert_close(run(make_loss(corrected), draw(1, 3, 8))[0], 3 * loss_of(loss="reinforce")[0])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("loss", "needs 'scale'"),
        ("scalar", "made-up samples.*AssertionError"),
        ("broken", "made-up samples.*AttributeError"),
        ("not_a_function", "not a function"),
        ("missing", "missing"),
    ],
)
def test_a_function_that_does_not_fit_is_refused_at_start(outside, name, said):
    with pytest.raises(UserError, match=said):
        make_loss(AlgorithmConfig(loss=f"{outside}:{name}"))
