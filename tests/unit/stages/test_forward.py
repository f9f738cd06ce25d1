"""Stages that put one column of a model beside the responses; recorded responses in the place of sampled ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.unit.stages.conftest import PROMPT, Rig, scored
from tranship.config import AlgorithmConfig, KlConfig, RewardModelConfig
from tranship.stages import Stopwatch
from tranship.stages.forward import ForwardStage
from tranship.stages.recorded import RecordedStage


def test_a_forward_stage_gives_each_response_its_own_value(rig: Callable[..., Rig]) -> None:
    made = rig(AlgorithmConfig(kl=KlConfig(coef=0.1)))
    for group_id in (0, 1):
        made.admit(group_id, 2)
        made.sampled(group_id, [1 + group_id, 3], [scored(1.0), scored(0.0)])

    def compute(prompts, group_of, responses):
        assert [list(prompt) for prompt in prompts] == [list(PROMPT)] * 2
        assert list(group_of) == [0, 0, 1, 1]
        return [np.full(len(ids), float(place), dtype=np.float32) for place, ids in enumerate(responses)]

    stage = ForwardStage(
        "reference", "ref_logprobs", made.client, compute, kinds=("train",), max_groups=4, watch=Stopwatch()
    )
    assert stage.step()
    assert not stage.step()
    found = made.client.take("reference", max_groups=4)
    assert found is None


def test_a_reward_model_scores_both_kinds(rig: Callable[..., Rig]) -> None:
    made = rig(AlgorithmConfig(), RewardModelConfig(path="m"))
    assert made.row("reward_model").kinds == ("val", "train")
    assert "model_score" in made.row("reward").reads


def test_a_preference_is_chosen_before_rejected(rig: Callable[..., Rig]) -> None:
    made = rig(AlgorithmConfig(name="dpo", kl=KlConfig(coef=0.0)), batch=1)
    recorded = [
        {"token_ids": [1, 2], "mask": [True, True]},
        {"token_ids": [1, 3, 4], "mask": [False, True, True]},
    ]
    made.admit(0, 2, recorded=recorded)
    stage = RecordedStage(made.client, max_groups=2, emit=made.events.append, watch=Stopwatch())
    assert stage.step()
    group = made.dock._flow.table.get(0)
    assert group is not None
    assert group.tokens == {0: len(PROMPT) + 2, 1: len(PROMPT) + 3}
    reference = made.client.take("reference", max_groups=1)
    assert reference is not None
    made.client.put(
        reference.ids, {"ref_logprobs": [np.zeros(2, np.float32), np.zeros(3, np.float32)]}, reference.lease
    )
    made.client.ack(reference.lease)
    batch = made.client.take_batch("train", groups=1)
    assert batch is not None
    assert [list(ids) for ids in batch["response"]] == [[1, 2], [1, 3, 4]]
    assert [list(a) for a in batch["advantages"]] == [[1, 1], [-1, -1, -1]]
    assert [list(m) for m in batch["loss_mask"]] == [[True, True], [False, True, True]]
    assert [event["group_id"] for event in made.events] == [0]


def test_a_preference_without_two_responses_is_a_bug(rig: Callable[..., Rig]) -> None:
    made = rig(AlgorithmConfig(name="dpo"), batch=1)
    made.admit(0, 2, recorded=[{"token_ids": [1], "mask": [True]}])
    stage = RecordedStage(made.client, max_groups=2, emit=made.events.append, watch=Stopwatch())
    with pytest.raises(AssertionError, match="group 0 has 1"):
        stage.step()
