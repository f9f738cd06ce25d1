"""The reward of reasoning-gym's tasks: each one's own verifier."""

from __future__ import annotations

import importlib
import json
import re
from typing import Any

from tranship.types import UserError


class ReasoningGym:
    """What the verifier of a reasoning-gym dataset says of the answer, mostly 0 to 1 (some give parts for a near miss).

    extra_info: the dataset's entry under "entry" (question, answer, metadata), its name under "dataset" (without it,
    the entry's metadata says it), and under "config" its arguments, if there are any. The answer is the content of the
    last <answer>...</answer>; tag: another name, null: the whole response. Without one the verifier sees no answer.
    Examples for chain_sum with the answer -4: "<answer>-4</answer>" 1; "-4" 0 and not well formed, with tag null 1.
    Raises UserError without the library.
    """

    def __init__(self, tag: str | None = "answer") -> None:
        try:
            self._library = importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise UserError("reasoning-gym is not installed: pip install 'tranship[rewards]'") from error
        name = re.escape(tag) if tag else ""
        self._pattern = re.compile(f"<{name}>((?:(?!<{name}>).)*?)</{name}>", re.DOTALL) if tag else None
        self._verifiers: dict[str, Any] = {}

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> dict[str, float]:
        """The score of a response. Raises ValueError where extra_info has no entry, or names no dataset."""
        known = extra_info or {}
        entry = known.get("entry")
        if not isinstance(entry, dict):
            raise ValueError("extra_info has no reasoning-gym entry under 'entry'")
        name = known.get("dataset") or (entry.get("metadata") or {}).get("source_dataset")
        if not name:
            raise ValueError("neither extra_info['dataset'] nor the entry's metadata names a reasoning-gym dataset")
        config = known.get("config") or {}
        key = json.dumps([name, config], sort_keys=True)
        if key not in self._verifiers:
            self._verifiers[key] = self._library.create_dataset(name, **config).score_answer
        answer = self._answer(solution_str)
        return {
            "score": float(self._verifiers[key](answer=answer, entry=entry)),
            "well_formed": float(answer is not None),
        }

    def _answer(self, text: str) -> str | None:
        if self._pattern is None:
            return text.strip()
        found = self._pattern.findall(text)
        return found[-1].strip() if found else None
