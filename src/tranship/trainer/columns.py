"""A group's own columns, as admission puts them into the dock."""

from __future__ import annotations

from typing import Any

from tranship.types import Prompt


def prompt_columns(prompt: Prompt, *, greedy: bool = False) -> dict[str, Any]:
    """The columns `prompt` (token ids) and `prompt_info` (all else that a stage may want to know of a prompt)."""
    info = {
        "index": prompt.index,
        "text": prompt.text,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "ability": prompt.ability,
        "extra_info": prompt.extra_info,
        "messages": list(prompt.messages),
        "tools": list(prompt.tools),
        "greedy": greedy,
    }
    if prompt.recorded:
        info["recorded"] = [{"token_ids": r.token_ids.tolist(), "mask": r.mask.tolist()} for r in prompt.recorded]
    return {"prompt": prompt.token_ids, "prompt_info": info}
