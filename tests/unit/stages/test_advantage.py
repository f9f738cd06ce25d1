"""From scored groups to advantages: what is trained on, what is filtered, and what is nobody's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.stages.conftest import Rig, scored
from tranship.algorithms.estimate import make_estimate
from tranship.config import AlgorithmConfig, KlConfig
from tranship.stages import Stopwatch
from tranship.stages.advantage import AdvantageStage
from tranship.types import SampleId


def stage_of(rig: Rig, algorithm: AlgorithmConfig) -> AdvantageStage:
    return AdvantageStage(
        rig.client,
        reads=rig.row("advantage").reads,
        estimate=make_estimate(algorithm),
        keep_without_signal=algorithm.keep_groups_without_signal,
        describe=lambda batch, row: {"status": batch["reward"][row]["status"]},
        emit=rig.events.append,
        watch=Stopwatch(),
    )


INVALID = {"status": "invalid", "value": None, "raw": None, "reason": "it raised", "extra": {}}
MASKED = {"status": "masked", "value": None, "raw": None, "reason": "", "extra": {}}


def test_a_masked_sample_has_no_gradient_and_enters_no_mean(rig: Callable[..., Rig]) -> None:
    algorithm = AlgorithmConfig(advantage_args={"scale_by_std": False})
    made = rig(algorithm, batch=1)
    made.admit(0, 4)
    made.sampled(0, [2, 3, 1, 2], [scored(1.0), INVALID, scored(0.0), MASKED])
    assert stage_of(made, algorithm).step()
    batch = made.client.take_batch("train", groups=1)
    assert batch is not None
    assert [list(a) for a in batch["advantages"]] == [[0.5, 0.5], [0, 0, 0], [-0.5], [0, 0]]
    assert [list(m) for m in batch["loss_mask"]] == [[True, True], [False] * 3, [True], [False] * 2]
    assert [sample["advantage"] for sample in made.events[0]["samples"]] == [0.5, 0.0, -0.5, 0.0]


def test_the_filter_looks_at_the_raw_score(rig: Callable[..., Rig]) -> None:
    algorithm = AlgorithmConfig()
    made = rig(algorithm)
    for group_id in (0, 1):
        made.admit(group_id, 2)
    made.sampled(0, [1, 1], [scored(0.0, raw=0.0), scored(-1.0, raw=0.0)])
    made.sampled(1, [1, 1], [scored(0.0, raw=1.0), scored(0.0, raw=0.0)])
    stage_of(made, algorithm).step()
    assert [event["outcome"] for event in made.events] == ["filtered", "train"]
    assert made.dock.ledger.dropped == {"filtered": 1}


def test_a_group_that_nobody_could_score_is_invalid_with_its_reason(rig: Callable[..., Rig]) -> None:
    algorithm = AlgorithmConfig(keep_groups_without_signal=True)
    made = rig(algorithm)
    made.admit(0, 2)
    made.sampled(0, [1, 1], [INVALID, INVALID])
    stage_of(made, algorithm).step()
    assert made.dock.ledger.dropped == {"invalid:it raised": 1}


def test_with_refill_a_filtered_group_gives_its_place_to_another(rig: Callable[..., Rig]) -> None:
    algorithm = AlgorithmConfig(name="dapo")
    made = rig(algorithm, batch=2)
    stage = stage_of(made, algorithm)
    for group_id in (0, 1):
        made.admit(group_id, 2)
    assert made.dock.num_admissible() == 0
    made.sampled(0, [1, 1], [scored(1.0), scored(1.0)])
    made.sampled(1, [1, 1], [scored(1.0), scored(0.0)])
    stage.step()
    assert made.client.take_batch("train", groups=2) is None
    assert made.dock.num_admissible() == 1
    made.admit(2, 2)
    made.sampled(2, [1, 1], [scored(1.0), scored(0.0)])
    stage.step()
    batch = made.client.take_batch("train", groups=2)
    assert batch is not None
    assert batch.window == (1, 2)
    assert batch.num_dropped == 0


def test_the_kl_is_taken_off_the_reward(rig: Callable[..., Rig]) -> None:
    algorithm = AlgorithmConfig(
        advantage="reinforce",
        keep_groups_without_signal=True,
        kl=KlConfig(coef=0.5, estimator="k1", where="reward"),
    )
    made = rig(algorithm, batch=1)
    made.admit(0, 1)
    made.sampled(0, [3], [scored(1.0)])
    refs = [np.full(3, -1.5, dtype=np.float32)]
    made.client.put([SampleId(0, 0)], {"ref_logprobs": refs})
    stage_of(made, algorithm).step()
    batch = made.client.take_batch("train", groups=1)
    assert batch is not None
    # k1 is logp - ref = .5 a token: 1 - .5 * 3 * .5
    assert list(batch["advantages"][0]) == pytest.approx([0.25] * 3)
    assert made.events[0]["metrics"]["kl"] == (1.5, 3.0)
