"""What other systems call our keys: one table, read by the error for unknown keys and by the page docs/names.md.

`tranship.config.names` has one file for each system, which says what release was looked at. `make names` writes the
page.
"""

from __future__ import annotations

from tranship.config.names.mindspeed_rl import MINDSPEED_RL
from tranship.config.names.name import Name
from tranship.config.names.openrlhf import OPENRLHF
from tranship.config.names.slime import SLIME
from tranship.config.names.trl import TRL
from tranship.config.names.verl import VERL

VOCABULARY: tuple[Name, ...] = (*VERL, *TRL, *OPENRLHF, *SLIME, *MINDSPEED_RL)


def named(path: str) -> list[Name]:
    """The entries that a path written by a user may mean: equal, or one ends with the other (`rollout.n`, `x.beta`).

    Those of the longest overlap only, so that `rollout.n` does not also stand for every other name that ends in n. A
    name of a command line may be written as there (`n-samples-per-prompt`).
    """
    path = path.replace("-", "_")
    found: list[tuple[int, Name]] = []
    for entry in VOCABULARY:
        shorter, longer = sorted((path, entry.name), key=len)
        if longer == shorter or longer.endswith(f".{shorter}"):
            found.append((len(shorter), entry))
    best = max((length for length, _ in found), default=0)
    return [entry for length, entry in found if length == best]


def page() -> str:
    """docs/names.md: for each system, its names beside ours."""
    lines = [
        "# What other systems call it",
        "",
        "A name of another system in a recipe is refused, and the error names our key from this table. `make names`",
        "writes this page from `src/tranship/config/names/`, one file a system. The names were looked up in verl 0.9,",
        "TRL 1.16 and transformers 5 (a few are from earlier releases), the PPO command of OpenRLHF (2025), slime's",
        "command line (2026, with `_` for `-`), and the configuration classes and recipes of MindSpeed RL (2025).",
        "",
        "Units differ in one place above all: `train.batch_size` counts samples, which is prompts ×",
        "`rollout.group_size`. An algorithm is one name here (`algorithm.name`), which sets other keys where a recipe",
        "does not: [the algorithms](algorithms/README.md).",
    ]
    for system in dict.fromkeys(entry.system for entry in VOCABULARY):
        lines += ["", f"## {system}", "", "| there | here | difference |", "|---|---|---|"]
        lines += [
            f"| `{entry.name}` | `{entry.key}` | {entry.note} |" for entry in VOCABULARY if entry.system == system
        ]
    return "\n".join(lines) + "\n"
