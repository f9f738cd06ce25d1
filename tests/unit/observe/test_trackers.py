"""What is said of a tracker before a run starts, and the id that a run keeps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tranship.observe.trackers import check_trackers, kept_id, make_tracker
from tranship.types import UserError


def test_a_missing_package_comes_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r'wandb needs wandb, .*pip install "tranship\[wandb\]"'):
        check_trackers(["jsonl", "wandb"])
    check_trackers(["jsonl", "tensorboard"])


def test_a_folder_of_the_packages_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio").mkdir()
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="trackio needs trackio"):
        make_tracker("trackio", tmp_path, None, project="p", config={})


def test_an_id_is_kept_when_a_run_goes_on_and_made_anew_when_it_starts(tmp_path: Path) -> None:
    folder = tmp_path / "wandb"
    first = kept_id(folder, None)
    assert kept_id(folder, 3) == first
    assert kept_id(folder, None) != first
    assert kept_id(tmp_path / "other", 3, lambda: "made") == "made", "an older run that had no such tracker"
    assert kept_id(tmp_path / "other", 4) == "made"
