from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tranship.config.keys import KEYS
from tranship.config.nearest import hint
from tranship.config.vocabulary import VOCABULARY, named, page

ROOT = Path(__file__).parents[3]


def test_every_target_is_a_key_of_ours() -> None:
    assert [entry for entry in VOCABULARY if entry.key not in KEYS] == []


def test_each_name_of_a_system_comes_once_and_all_systems_are_there() -> None:
    twice = [pair for pair, count in Counter((e.system, e.name) for e in VOCABULARY).items() if count > 1]
    assert twice == []
    per_system = Counter(entry.system for entry in VOCABULARY)
    assert set(per_system) == {"verl", "TRL", "OpenRLHF", "slime", "MindSpeed RL"}
    assert min(per_system.values()) >= 30


@pytest.mark.parametrize("entry", VOCABULARY, ids=lambda entry: f"{entry.system}:{entry.name}")
def test_the_error_for_a_foreign_name_leads_to_our_key(entry) -> None:
    if entry.name not in KEYS:
        assert entry.key in hint(entry.name)


def test_only_the_longest_overlap_counts() -> None:
    assert {entry.name for entry in named("rollout.n")} == {"actor_rollout_ref.rollout.n"}
    assert named("n_samples") == []


def test_a_name_of_a_command_line_may_be_written_as_there() -> None:
    assert {(entry.system, entry.key) for entry in named("rollout-max-response-len")} == {
        ("slime", "rollout.max_response_tokens")
    }
    assert "slime calls eps_clip_high what is algorithm.clip_high here" in hint("eps-clip-high")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("algorithm.adv_estimator", "algorithm.name"),
        ("algorithm.filter_groups.enable", "algorithm.dynamic_sampling"),
        ("algorithm.rollout_correction.rollout_is", "algorithm.correction.name"),
        ("critic.cliprange_value", "algorithm.critic.value_clip"),
        ("actor_rollout_ref.rollout.multi_turn.enable", "env.name"),
        ("reward_model.overlong_buffer.len", "reward.overlong.cache_tokens"),
        ("mask_truncated_completions", "reward.mask_truncated"),
        ("use_tis", "algorithm.correction.name"),
    ],
)
def test_what_an_algorithm_is_made_of_leads_to_one_key(name: str, key: str) -> None:
    assert {entry.key for entry in named(name)} == {key}


def test_the_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "names.md").read_text(encoding="utf-8")
    assert written == page(), "run: make names"
