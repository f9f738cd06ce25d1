"""A checkpoint is whole or not there: under a full disk, a cut file, a changed byte, a crash between two renames."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tranship.trainer.checkpoint import read_latest, write_cut
from tranship.types import RunError, UserError


def _save(text: str):
    def save(folder: Path) -> None:
        (folder / "trainer").mkdir()
        (folder / "trainer" / "weights.bin").write_text(text)

    return save


def _write(run_dir: Path, step: int, text: str = "weights", keep_last: int = 2) -> Path:
    return write_cut(run_dir, step, save=_save(text), state={"version": step}, keep_last=keep_last)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = _write(tmp_path, 3)
    cut = read_latest(tmp_path)
    assert cut is not None
    assert cut.folder == folder
    assert cut.state == {"version": 3}
    assert (cut.folder / "trainer" / "weights.bin").read_text() == "weights"


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert read_latest(tmp_path) is None


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        _write(tmp_path, step)
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == ["step-000003", "step-000010"]


def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path) -> None:
    _write(tmp_path, 1)

    def full(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        RunError, match=r"step 2 could not be written.*No space left.*last good checkpoint is .*step-000001"
    ):
        write_cut(tmp_path, 2, save=full, state={"version": 2}, keep_last=2)
    cut = read_latest(tmp_path)
    assert cut is not None
    assert cut.state["version"] == 1
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")] == []


def test_a_crash_before_the_pointer_moves_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, 1)

    class Crash(BaseException):
        pass

    def crash(root: Path, name: str) -> None:
        raise Crash

    monkeypatch.setattr("tranship.trainer.checkpoint._point_to", crash)
    with pytest.raises(Crash):
        _write(tmp_path, 2)
    monkeypatch.undo()
    cut = read_latest(tmp_path)
    assert cut is not None
    assert cut.state["version"] == 1
    _write(tmp_path, 2, "again")
    again = read_latest(tmp_path)
    assert again is not None
    assert (again.folder / "trainer" / "weights.bin").read_text() == "again"


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    _write(tmp_path, 1)
    file = _write(tmp_path, 2) / "trainer" / "weights.bin"
    if damage == "truncate":
        file.write_text("weig")
    elif damage == "flip":
        file.write_text("weightS")
    else:
        file.unlink()
    with pytest.raises(UserError, match=r"damaged \(trainer/weights.bin.*write 'step-000001' into"):
        read_latest(tmp_path)
