"""An engine that notes what it is asked, for tests of whole runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from tranship.rollout import GroupRequest
from tranship.rollout.native.engine import NativeEngine

NOTES = "TRANSHIP_TEST_NOTES"
BROKEN = "broken"


class NotedEngine(NativeEngine):
    """Writes a line into the folder that the environment names for each update, probe and request of this process. Its
    log-probs are wrong if a file `broken` was there when it was made."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._notes = Path(os.environ[NOTES])
        self._broken = (self._notes / BROKEN).exists()

    def submit(self, request: GroupRequest) -> None:
        self._note("submit")
        super().submit(request)

    def finish_update(self, policy_version: int) -> None:
        super().finish_update(policy_version)
        self._note("update")

    def probe(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        self._note("probe")
        return super().probe(token_ids, temperature) + self._broken

    def _note(self, word: str) -> None:
        with (self._notes / "notes.jsonl").open("a") as file:
            file.write(json.dumps({"pid": os.getpid(), "word": word, "version": self.policy_version}) + "\n")


def notes_of(folder: Path, pid: int) -> list[tuple[str, int]]:
    """(word, version) of each note of a process, in order."""
    return [(row["word"], row["version"]) for row in _rows(folder) if row["pid"] == pid]


def words_of(folder: Path, pid: int) -> list[str]:
    """The words alone."""
    return [word for word, _ in notes_of(folder, pid)]


def pids_of(folder: Path) -> set[int]:
    """The processes that wrote any."""
    return {row["pid"] for row in _rows(folder)}


def _rows(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "notes.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
