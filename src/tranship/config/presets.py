"""Presets by name: what the keys of `algorithm` and of `dock` are where a recipe is silent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

Flow = Literal["policy", "ppo", "dpo", "sft"]


@dataclass(frozen=True)
class Preset:
    """One algorithm. flow: its table of stages. sets: keys of `algorithm` and their values; nested ones are merged."""

    flow: Flow
    sets: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


_NO_BASELINE: Mapping[str, Any] = {"advantage": "reinforce", "keep_groups_without_signal": True}

ALGORITHMS: Mapping[str, Preset] = {
    "grpo": Preset("policy", source="arXiv:2402.03300"),
    "dr_grpo": Preset(
        "policy",
        {"advantage_args": {"scale_by_std": False}, "aggregation": "seq-mean-token-sum-norm"},
        "arXiv:2503.20783",
    ),
    "dapo": Preset("policy", {"clip_high": 0.28, "dynamic_sampling": True}, "arXiv:2503.14476"),
    "rloo": Preset("policy", {"advantage": "rloo", "aggregation": "seq-mean-token-sum"}, "arXiv:2402.14740"),
    "reinforce": Preset(
        "policy", {**_NO_BASELINE, "loss": "reinforce", "aggregation": "seq-mean-token-sum"}, "Williams 1992"
    ),
    "reinforce_pp": Preset(
        "policy",
        {**_NO_BASELINE, "whiten_advantages": True, "kl": {"estimator": "k1", "where": "reward"}},
        "arXiv:2501.03262",
    ),
    "reinforce_pp_baseline": Preset(
        "policy",
        {
            "advantage_args": {"scale_by_std": False},
            "keep_groups_without_signal": True,
            "whiten_advantages": True,
            "kl": {"estimator": "k2"},
        },
        "arXiv:2501.03262",
    ),
    "gspo": Preset(
        "policy",
        {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq-mean-token-mean"},
        "arXiv:2507.18071",
    ),
    "cispo": Preset("policy", {"loss": "cispo", "clip_high": 4.0}, "arXiv:2506.13585"),
    "ppo": Preset(
        "ppo",
        {
            "advantage": "gae",
            "whiten_advantages": True,
            "keep_groups_without_signal": True,
            "kl": {"estimator": "k1", "where": "reward"},
        },
        "arXiv:1707.06347",
    ),
    "dpo": Preset("dpo", {"loss": "dpo", "aggregation": "seq-mean-token-sum"}, "arXiv:2305.18290"),
    "sft": Preset("sft", {"loss": "sft"}),
}


# What the keys of `dock` are. small: a laptop's memory, or a container whose /dev/shm has Docker's 64 MiB.
DOCKS: Mapping[str, Mapping[str, Any]] = {
    "standard": {"slab_bytes": 16 << 20, "capacity_bytes": 1 << 30, "prefault_slabs": 2},
    "small": {"slab_bytes": 1 << 20, "capacity_bytes": 32 << 20, "prefault_slabs": 0},
}


def dock_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `dock` with its preset's values where `values` is silent."""
    name = values.get("preset", "standard")
    return {**(DOCKS.get(name, {}) if isinstance(name, str) else {}), **values}


def preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `algorithm` with the algorithm's own values where `values` is silent."""
    name = values.get("name", "grpo")
    found = ALGORITHMS.get(name) if isinstance(name, str) else None
    return _merged(found.sets, values) if found else dict(values)


def _merged(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**defaults, **values}
    for key, default in defaults.items():
        given = values.get(key)
        if isinstance(given, BaseModel):
            given = {name: getattr(given, name) for name in given.model_fields_set}
        if isinstance(default, Mapping) and isinstance(given, Mapping) and key != "advantage_args":
            merged[key] = {**default, **given}
    return merged
