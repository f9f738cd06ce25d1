"""A run's folder belongs to one run, and what an earlier run left is not lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tranship.trainer.folder import RunFolder
from tranship.types import UserError

_HOLD = """
import sys, time
from pathlib import Path
from tranship.trainer.folder import RunFolder
with RunFolder(Path(sys.argv[1]), resume=False):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_in_use_is_refused_with_its_owner(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"in use by another run \(process {holder.pid}\)"):
            RunFolder(tmp_path / "run", resume=True)
    finally:
        holder.kill()
        holder.wait()
    with RunFolder(tmp_path / "run", resume=True) as folder:
        assert folder.set_aside is None


def test_an_earlier_run_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for expected in (None, path.with_name("run.1"), path.with_name("run.2")):
        with RunFolder(path, resume=False) as folder:
            assert folder.set_aside == expected
            (path / "metrics.jsonl").write_text(f"after {expected}")
    assert (tmp_path / "run.1" / "metrics.jsonl").read_text() == "after None"


def test_resuming_stays_in_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text("kept")
    with RunFolder(path, resume=True) as folder:
        assert folder.set_aside is None
        assert (path / "metrics.jsonl").read_text() == "kept"


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run.dir .* cannot be written"):
        RunFolder(tmp_path / "file" / "run", resume=False)
