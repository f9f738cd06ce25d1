"""The prompts of a run, and what became of each row of their sources: what was left out and why, and what is double."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tranship.types import Prompt

_SHOWN = 3


class Dropped(NamedTuple):
    """A row that was left out: its number, its place in the source (file and line), and why."""

    row: int
    where: str
    reason: str


@dataclass(frozen=True)
class PromptPart:
    """One source of a set. start, stop: its range in the set's prompts; num_rows: rows read; weight: in a mixture."""

    source: str
    start: int
    stop: int
    num_rows: int
    weight: float = 1.0


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a source, or of the parts of a mixture one after the other.

    Prompt.index is the row's number, from 0; in a mixture the rows of a part count on from the last row of the part
    before. dropped: rows that were left out, by the same numbers. duplicates: prompts whose tokens (and recorded
    responses) an earlier prompt of the same source has too; they stay. notes: what a person should know about the rows.
    """

    prompts: list[Prompt]
    dropped: list[Dropped]
    notes: tuple[str, ...] = ()
    parts: tuple[PromptPart, ...] = ()
    duplicates: int = 0

    @cached_property
    def digest(self) -> str:
        """32 hex digits of what a position in the stream stands for: token ids, ground truths and recorded responses
        of all prompts in their order, and the parts' sizes and weights. Another digest: other data."""
        digest = hashlib.blake2b(digest_size=16)
        for part in self.parts:
            digest.update(json.dumps([part.start, part.stop, part.weight]).encode())
        for prompt in self.prompts:
            digest.update(prompt_digest(prompt))
            digest.update(json.dumps([prompt.data_source, prompt.ground_truth], sort_keys=True).encode())
        return digest.hexdigest()

    @property
    def numbers(self) -> dict[str, int]:
        """Counts for metrics: rows read, prompts that are used, rows that were left out, duplicates."""
        return {
            "rows": len(self.prompts) + len(self.dropped),
            "prompts": len(self.prompts),
            "dropped": len(self.dropped),
            "duplicates": self.duplicates,
        }

    def of_part(self, part: PromptPart) -> Sequence[Prompt]:
        """The prompts of one part."""
        return self.prompts[part.start : part.stop]

    def report(self) -> list[str]:
        """What was read, left out and found double, one fact a line, for the console."""
        lines = []
        total = sum(part.weight for part in self.parts)
        for part in self.parts:
            share = f", {part.weight / total:.1%} of the stream" if len(self.parts) > 1 else ""
            lines.append(f"{part.source}: {part.num_rows} rows, {part.stop - part.start} prompts{share}")
        for kind, count in Counter(_kind(entry.reason) for entry in self.dropped).most_common():
            first = [entry for entry in self.dropped if _kind(entry.reason) == kind][:_SHOWN]
            shown = "; ".join(f"{entry.where}: {entry.reason}" for entry in first)
            lines.append(f"dropped {count} rows: {kind} ({shown}{'; ...' if count > _SHOWN else ''})")
        return [*lines, *self.notes]


def write_dropped(path: Path, sets: Mapping[str, PromptSet]) -> None:
    """Write every row that was left out, one JSON object a line: set, row, where, reason. Nothing left out: no lines.

    sets: name ("train", "val") -> its prompts.
    """
    with path.open("w", encoding="utf-8") as file:
        for name, prompts in sets.items():
            for entry in prompts.dropped:
                file.write(json.dumps({"set": name, **entry._asdict()}, ensure_ascii=False) + "\n")


def shared_prompts(train: PromptSet, val: PromptSet) -> list[Prompt]:
    """The held-out prompts whose tokens a training prompt has too: what a validation of them measures is memory."""
    seen = {prompt.token_ids.tobytes() for prompt in train.prompts}
    return [prompt for prompt in val.prompts if prompt.token_ids.tobytes() in seen]


def prompt_digest(prompt: Prompt) -> bytes:
    """32 bytes of a prompt's tokens and recorded responses."""
    digest = hashlib.blake2b(digest_size=32)
    for array in (prompt.token_ids, *(part for r in prompt.recorded for part in (r.token_ids, r.mask))):
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(array.tobytes())
    return digest.digest()


def _kind(reason: str) -> str:
    """A reason without its numbers: what rows are counted by."""
    return reason.partition(":")[0]
