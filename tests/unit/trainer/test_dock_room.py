"""The dock's memory and its policies are looked at before anything starts."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tranship.config import Config
from tranship.config.load import dump, load, loads
from tranship.config.schema import PlacementConfig
from tranship.dock import Dock, DockClient, StageNeeds
from tranship.stages import stage_table
from tranship.trainer import dock_room
from tranship.trainer.dock_room import batch_bytes, check_room, check_shared_memory
from tranship.types import SampleId, UserError
from tranship.worker.dock_service import stage_needs

Usage = namedtuple("Usage", "total used free")


def config_of(**dock: Any) -> Config:
    return loads(
        {
            "model": {"path": "tiny-random"},
            "data": {"train": {"source": "sums"}},
            "rollout": {"group_size": 4, "max_response_tokens": 1000},
            "reward": {"function": "exact_integer"},
            "train": {"steps": 1, "batch_size": 64},
            "placement": {"runtime": "ray", "layout": "split", "num_samplers": 3},
            "dock": dock,
        }
    )


def needs_of(**policies: str) -> dict[str, StageNeeds]:
    config = config_of(policies=policies)
    return {needs.name: needs for needs in stage_needs(config, stage_table(config.algorithm))}


# Presets


def test_a_preset_fills_what_the_recipe_leaves_open(tmp_path: Path) -> None:
    standard, small = config_of().dock, config_of(preset="small").dock
    assert (standard.slab_bytes, standard.capacity_bytes) == (16 << 20, 1 << 30)
    assert (small.slab_bytes, small.capacity_bytes, small.prefault_slabs) == (1 << 20, 32 << 20, 0)
    assert config_of(preset="small", slab_bytes=2 << 20).dock.slab_bytes == 2 << 20
    shown = tmp_path / "shown.yaml"
    shown.write_text(dump(config_of(preset="small", slab_bytes=2 << 20)))
    assert load(shown) == config_of(preset="small", slab_bytes=2 << 20)


# Policies


def test_several_samplers_share_out_by_predicted_lengths_and_one_takes_as_it_comes() -> None:
    assert needs_of()["rollout"].policy == "dispatch"
    assert needs_of(rollout="first_come")["rollout"].policy == "first_come"
    alone = config_of().model_copy(update={"placement": PlacementConfig()})
    assert {one.policy for one in stage_needs(alone, stage_table(alone.algorithm))} == {"first_come"}


def test_stages_have_the_policies_of_the_recipe_and_as_many_readers_as_samplers() -> None:
    needs = needs_of(reward="balanced", rollout="ordered")
    assert {name: one.policy for name, one in needs.items()} == {
        "rollout": "ordered",
        "reward": "balanced",
        "advantage": "first_come",
        "train": "first_come",
        "validate": "first_come",
    }
    assert (needs["reward"].readers, needs["advantage"].readers) == (3, 1)


@pytest.mark.parametrize(
    ("stage", "policy", "said"),
    [
        ("rewards", "ordered", "no stage is called 'rewards'; those of grpo are: rollout, reward, advantage"),
        ("reward", "orderd", "dock.policies.reward: 'orderd' is not known; use one of: balanced, dispatch"),
        ("rollout", "balanced", "rollout takes prompts, whose responses have no length yet: use dispatch"),
        ("reward", "dispatch", "reward does not say what it has left to do, as samplers do: use balanced"),
        ("train", "first_come", "train takes the batches that the staleness bound chooses"),
    ],
)
def test_a_policy_or_a_stage_that_is_not_there_is_refused(stage: str, policy: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        needs_of(**{stage: policy})
    assert said in str(refused.value)


# Memory


def test_too_little_shared_memory_is_said_with_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_free(nbytes: int) -> None:
        monkeypatch.setattr(dock_room.shutil, "disk_usage", lambda path: Usage(0, 0, nbytes))

    monkeypatch.setattr(dock_room, "_SHARED_MEMORY", Path("/"))
    with_free((64 << 20) - 5)
    with pytest.raises(UserError, match=r"63 MiB free .* dock\.capacity_bytes 1073741824 .* dock\.preset=small, or"):
        check_shared_memory(config_of())
    check_shared_memory(config_of(preset="small"))
    check_shared_memory(config_of(capacity_bytes=63 << 20, slab_bytes=1 << 20))
    with_free(20 << 20)
    with pytest.raises(UserError, match=r"set dock\.capacity_bytes to at most 20971520"):
        check_shared_memory(config_of(preset="small"))


def test_a_batch_that_cannot_fit_is_refused_with_what_it_takes() -> None:
    config = config_of(capacity_bytes=1 << 20, slab_bytes=1 << 16)
    table = stage_table(config.algorithm)
    with pytest.raises(
        UserError, match=r"64 responses of up to 1000 tokens .* set dock\.capacity_bytes=(\d+)"
    ) as refused:
        check_room(config, table, 3, 100)
    wanted = int(str(refused.value).split("dock.capacity_bytes=")[1].split(",")[0])
    check_room(config_of(capacity_bytes=wanted, slab_bytes=1 << 16), table, 3, 100)
    with pytest.raises(UserError):
        check_room(config_of(capacity_bytes=wanted - (1 << 20), slab_bytes=1 << 16), table, 3, 100)


@pytest.mark.parametrize("slab", [1 << 16, 1 << 17, 1 << 20])
def test_a_batch_of_the_longest_responses_takes_no_more_than_was_said(slab: int) -> None:
    """Put through a dock with the room that is asked for, as single groups, by one writer."""
    config = config_of(slab_bytes=slab, capacity_bytes=1 << 26)
    table = stage_table(config.algorithm)
    size, length, prompt = config.rollout.group_size, config.rollout.max_response_tokens, 300
    dock = Dock(
        stage_needs(config, table),
        run_id="room",
        batch_groups=config.groups_per_step,
        staleness=0,
        lease_s=60.0,
        slab_bytes=slab,
        capacity_bytes=batch_bytes(config, table, prompt) + slab,
        shared=False,
        ordered=True,
    )
    client = DockClient(lambda method, *a, **k: getattr(dock, method)(*a, **k), "worker", wait_s=0)
    words = {"text": "w" * 400, "data_source": "here", "ground_truth": "1" * 40}
    for group_id in range(config.groups_per_step):
        own = {"prompt": np.zeros(prompt, np.int32), "prompt_info": words}
        client.admit([(group_id, size, "train", own)])
        rows = [SampleId(group_id, index) for index in range(size)]
        floats, bools = [np.zeros(length, np.float32)] * size, [np.ones(length, bool)] * size
        ints = [np.zeros(length, np.int32)] * size
        sampled = {"response": ints, "response_mask": bools, "logprobs": floats, "policy_versions": ints}
        client.put(rows, {**sampled, "finish_reason": ["stop"] * size, "rollout_info": [{}] * size}, sampled_version=0)
        client.put(
            rows, {"reward": [{"value": 1.0, "status": "scored", "reason": "", "extra": {"a": "b" * 400}}] * size}
        )
        client.put(rows, {"advantages": floats, "loss_mask": bools})
    batch = client.take_batch("train", groups=config.groups_per_step)
    assert batch is not None
    assert dock.memory_use().busy_bytes > 0.4 * batch_bytes(config, table, prompt)
    dock.close()


@pytest.mark.parametrize(
    ("controllers", "said"),
    [
        (["rewards"], "no stage is called 'rewards'; those of grpo are: rollout, reward, advantage"),
        (["rollout"], "rollout keeps its controller in the dock, which holds it to the staleness bound"),
        (["reward", "reward"], "name each stage once"),
    ],
)
def test_a_controller_that_cannot_be_elsewhere_is_refused(controllers: list[str], said: str) -> None:
    config = config_of(controllers=controllers)
    with pytest.raises(UserError, match=said):
        stage_needs(config, stage_table(config.algorithm))
