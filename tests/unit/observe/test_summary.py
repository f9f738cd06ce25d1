"""summary.json is whole or not there, and says what it was measured on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tranship.observe.summary import REQUIRED, write_summary


def values() -> dict:
    return {key: None for key in REQUIRED if key not in ("machine", "versions")} | {"status": "finished"}


def test_it_has_machine_and_versions(tmp_path: Path) -> None:
    written = json.loads(write_summary(tmp_path, values()).read_text())
    assert set(REQUIRED) <= written.keys()
    assert written["status"] == "finished"
    assert written["versions"]["tranship"]
    assert written["machine"]["cores"] >= 1
    assert written["machine"]["memory_bytes"] > 1 << 28
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_a_missing_key_is_a_bug(tmp_path: Path) -> None:
    incomplete = values()
    del incomplete["val_after"]
    with pytest.raises(AssertionError, match="val_after"):
        write_summary(tmp_path, incomplete)


def test_a_failed_write_leaves_the_old_summary(tmp_path: Path) -> None:
    write_summary(tmp_path, values())
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_summary(tmp_path, values() | {"val_after": float("nan")})
    assert json.loads((tmp_path / "summary.json").read_text())["val_after"] is None
