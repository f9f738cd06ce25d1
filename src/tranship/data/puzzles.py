"""Puzzles of the library reasoning-gym: endless, generated, with verifiers of their own."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Iterator
from typing import Any, Literal

from tranship.data.messages import to_json
from tranship.types import UserError

# Held-out puzzles are drawn from it whatever a source's seed is.
_HELD_OUT_SEED = 1_935_017_423


def puzzles(
    task: str,
    size: int | None = None,
    seed: int | None = None,
    split: Literal["train", "val"] = "train",
    num_val: int = 64,
    **settings: Any,
) -> Iterator[tuple[str, Any]]:
    """(place, row in verl's schema) of each puzzle of `reasoning_gym:task`.

    split "train": `size` puzzles (1000) drawn from `seed` (0), none with the question of a held-out one. "val":
    num_val held-out puzzles with different questions, always the same for the same task, num_val and settings; so both
    splits must be given the same num_val and settings. settings: the task's own (chain_sum: min_terms, ...).

    data_source is "reasoning_gym/task", the ground truth the library's answer. extra_info has what its verifier needs:
    dataset (the task), config (arguments of reasoning_gym.create_dataset), entry (the puzzle, in JSON values). Raises
    UserError for unknown tasks and settings, for tasks with too few different questions, and for the few tasks whose
    verifier does not read JSON values.
    """
    for name, value, least in (("size", size, 1), ("num_val", num_val, 0), ("seed", seed, 0)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise UserError(f"reasoning_gym:{task}: {name} is {value!r}: give a whole number of at least {least}")
    if split not in ("train", "val"):
        raise UserError(f"reasoning_gym:{task}: split is {split!r}: use train or val")
    if split == "val" and (size is not None or seed is not None):
        raise UserError(f"reasoning_gym:{task}: split val gives num_val puzzles, always the same: leave size, seed out")
    held_out = _held_out(task, num_val, settings)
    if split == "val":
        config, entries = _HELD_OUT_SEED, list(held_out.values())
    else:
        config, entries = seed or 0, _others(task, size or 1000, seed or 0, held_out, settings)
    if entries:
        _check_verifier(task, entries[0], settings)
    config = {**settings, "seed": config}
    return ((f"reasoning_gym:{task} {split} row {i}", _row(task, e, config, split)) for i, e in enumerate(entries))


def _held_out(task: str, count: int, settings: dict[str, Any]) -> dict[str, Any]:
    """`count` different questions, with their puzzles."""
    found: dict[str, Any] = {}
    if count:
        drawn = 20 * count + 100
        for entry in _draw(task, drawn, _HELD_OUT_SEED, settings):
            found.setdefault(entry["question"], entry)
            if len(found) == count:
                return found
        raise UserError(
            f"reasoning_gym:{task}: {drawn} puzzles have {len(found)} different questions, and num_val is {count}: "
            "lower num_val, or make the task harder"
        )
    return found


def _others(task: str, size: int, seed: int, held_out: dict[str, Any], settings: dict[str, Any]) -> list[Any]:
    drawn = 2 * size + 100
    usable = (entry for entry in _draw(task, drawn, seed, settings) if entry["question"] not in held_out)
    entries = list(itertools.islice(usable, size))
    if len(entries) < size:
        raise UserError(
            f"reasoning_gym:{task}: only {len(entries)} of {drawn} puzzles are not held out, and size is {size}: lower "
            "num_val, or make the task harder"
        )
    return entries


def _draw(task: str, count: int, seed: int, settings: dict[str, Any]) -> Iterator[Any]:
    dataset = _create(task, {**settings, "seed": seed, "size": count})
    return (dataset[index] for index in range(count))


def _create(task: str, config: dict[str, Any]) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(
            "a data source reasoning_gym:... needs the package reasoning-gym: pip install 'tranship[data]'"
        ) from error
    if task not in DATASETS or task == "composite":
        near = difflib.get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)[:5]
        raise UserError(f"reasoning_gym has no task {task!r}: try {', '.join(near)}; it has {len(DATASETS)}")
    try:
        return reasoning_gym.create_dataset(task, **config)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(f"reasoning_gym:{task}: it does not take {config}: {error}") from error


def _check_verifier(task: str, entry: Any, settings: dict[str, Any]) -> None:
    """Raise UserError unless the verifier scores the answer of an entry alike before and after its way through JSON."""
    verifier = _create(task, {**settings, "seed": 0, "size": 1})
    in_json = json.loads(json.dumps(to_json(entry, f"reasoning_gym:{task}")))
    if verifier.score_answer(entry["answer"], entry) != verifier.score_answer(in_json["answer"], in_json):
        raise UserError(
            f"reasoning_gym:{task}: its verifier does not read JSON values, so it cannot be used: take another task"
        )


def _row(task: str, entry: Any, config: dict[str, Any], split: str) -> dict[str, Any]:
    entry = to_json(entry, f"reasoning_gym:{task}")
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [{"role": "user", "content": entry["question"]}],
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {"split": split, "dataset": task, "config": config, "entry": entry},
    }
