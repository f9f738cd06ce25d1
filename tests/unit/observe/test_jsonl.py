"""Lines survive kills, and a broken one is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tranship.observe.jsonl import JsonlWriter, keep_rows, read_jsonl
from tranship.types import UserError


def test_a_torn_last_line_is_left_out_and_goes_with_the_next_rewrite(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]
    assert keep_rows(path, lambda row: row["step"] != 1) == [{"step": 1}]
    assert path.read_text() == '{"step": 2}\n'


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2 is not JSON"):
        list(read_jsonl(path))


def test_what_json_does_not_have_is_refused(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "new" / "a.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        writer.write({"x": float("nan")})
    writer.close()
    assert list(read_jsonl(tmp_path / "new" / "a.jsonl")) == []
    assert list(read_jsonl(tmp_path / "absent.jsonl")) == []
