"""What an algorithm's name sets, and settings that would be accepted and ignored."""

from __future__ import annotations

from typing import Any

import pytest

from tranship.config.load import dump, loads
from tranship.config.presets import ALGORITHMS
from tranship.config.yaml_text import read
from tranship.types import UserError


def config(**sections: Any):
    base: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train": {"source": "sums"}},
        "train": {"steps": 1},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return loads(base)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_name_sets_what_the_recipe_is_silent_about(name: str) -> None:
    algorithm = config(algorithm={"name": name}).algorithm
    for key, value in ALGORITHMS[name].sets.items():
        found = getattr(algorithm, key)
        if isinstance(value, dict) and key == "kl":
            assert {inner: getattr(found, inner) for inner in value} == value
        else:
            assert found == value


def test_what_the_recipe_says_stands() -> None:
    algorithm = config(algorithm={"name": "dapo", "clip_high": 0.3, "dynamic_sampling": False}).algorithm
    assert (algorithm.clip_high, algorithm.dynamic_sampling) == (0.3, False)
    kl = config(algorithm={"name": "reinforce_pp", "kl": {"coef": 0.5}}).algorithm.kl
    assert (kl.coef, kl.estimator, kl.where) == (0.5, "k1", "reward")


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_what_is_printed_is_a_recipe_again(name: str) -> None:
    resolved = config(algorithm={"name": name})
    assert loads(read(dump(resolved), "printed")) == resolved


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": {"name": "dpo", "correction": {"name": "decoupled"}}}, "correction.name has no meaning for dpo"),
        ({"algorithm": {"name": "sft", "advantage": "rloo"}}, "algorithm.advantage has no meaning for sft"),
        ({"algorithm": {"name": "sft", "kl": {"coef": 0.1, "where": "reward"}}}, "kl.where has no meaning for sft"),
        ({"algorithm": {"critic": {"lam": 0.5}}}, "algorithm.critic has no meaning for grpo: use algorithm.name=ppo"),
        ({"algorithm": {"name": "ppo", "keep_groups_without_signal": False}}, "keep_groups_without_signal=true"),
        (
            {"algorithm": {"dynamic_sampling": True, "keep_groups_without_signal": True}},
            "set one of them to false",
        ),
        ({"env": {"max_turns": 3}}, "env would have no effect: set env.name"),
        ({"env": {"name": "calculator"}, "algorithm": {"name": "sft"}}, "env.name 'calculator' has no meaning for sft"),
        ({"reward": {"model": {"weight": 2.0}}}, "reward.model would have no effect: set reward.model.path"),
        ({"reward": {"model": {"path": "r", "placement": "own"}}}, "use placement.runtime=ray"),
        ({"reward": {"function": "none"}}, "nothing gives a reward"),
        ({"reward": {"overlong": {"cache_tokens": 300}}}, "above rollout.max_response_tokens 256"),
        ({"reward": {"overlong": {"factor": 0.5}}}, "set reward.overlong.cache_tokens"),
        ({"data": {"max_tokens": 100}}, "data.max_tokens would have no effect: grpo has no recorded responses"),
        ({"data": {"train": {"source": "sums", "mixture": [{"source": "sums"}]}}}, "both source and mixture"),
        ({"data": {"train": {}}}, "names no source"),
        ({"data": {"train": {"mixture": [{"source": "sums"}], "limit": 3}}}, "belong to the parts of a mixture"),
    ],
)
def test_a_setting_without_effect_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        config(**sections)


@pytest.mark.parametrize(("name", "size"), [("grpo", 8), ("ppo", 8), ("dpo", 2), ("sft", 1)])
def test_the_groups_of_a_batch_follow_from_the_algorithm(name: str, size: int) -> None:
    resolved = config(algorithm={"name": name}, train={"steps": 1, "batch_size": 32})
    assert (resolved.group_size, resolved.groups_per_step) == (size, 32 // size)


def test_a_batch_of_halves_of_preferences_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.batch_size 33 is not a multiple of .* 2: use batch_size=3"):
        config(algorithm={"name": "dpo"}, train={"steps": 1, "batch_size": 33})
