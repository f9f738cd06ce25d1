from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tranship.cli.app as app_module
from tranship.cli.ledger import Account, read_account
from tranship.dock import Ledger
from tranship.types import RunError, UserError

COUNTS = {
    "admitted": 12,
    "trained": 6,
    "dropped": {"filtered": 2, "invalid:LookupError: no answer": 1, "too_stale": 1, "odd": 1},
    "in_flight": 1,
    "val_admitted": 0,
    "val_ended": 0,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run's folder that holds nothing but its configuration."""
    (tmp_path / "config.yaml").write_text("")
    return tmp_path


def write_summary(run_dir: Path, steps: int, ledger: dict[str, Any] | None, status: str = "completed") -> None:
    (run_dir / "summary.json").write_text(json.dumps({"steps": steps, "ledger": ledger, "status": status}))


def write_checkpoint(run_dir: Path, step: int, ledger: Ledger, in_flight: list[int]) -> None:
    folder = run_dir / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    dock = {"ledger": ledger.snapshot(), "in_flight": [[group_id, 0] for group_id in in_flight]}
    (folder / "state.json").write_text(json.dumps({"version": step, "dock": dock}))
    (run_dir / "checkpoints" / "latest").write_text(folder.name)


def write_metrics(run_dir: Path, *steps: int) -> None:
    rows = [
        {"kind": "step", "step": step, "ledger/admitted": 2.0 * step, "ledger/trained": 2.0 * step - 1}
        | {"ledger/in_flight": 0.0, "ledger/dropped/filtered": 1.0}
        for step in steps
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        app_module.main(["ledger", *arguments])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_every_outcome_has_a_line_and_they_add_up(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(run_dir, 3, COUNTS)
    assert call(str(run_dir)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "groups of prompts, as of step 3 (summary.json, completed)"
    rows = {name: count for count, name in (line.split(None, 1) for line in lines[1:-1])}
    assert rows == {
        "admitted": "12",
        "trained": "6",
        "filtered": "2",
        "invalid: LookupError: no answer": "1",
        "too stale": "1",
        "odd": "1",
        "in flight": "1",
    }
    assert lines[-1].startswith("balances:")


def test_json_has_the_same_numbers(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(run_dir, 3, COUNTS)
    assert call(str(run_dir), "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["invalid"] == {"LookupError: no answer": 1}
    assert facts["other"] == {"odd": 1}
    assert facts["balances"] is True
    assert facts["step"] == 3


def test_one_that_does_not_balance_is_an_error(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_summary(run_dir, 3, {**COUNTS, "trained": 5})
    assert call(str(run_dir)) == 1
    said = capsys.readouterr()
    assert "DOES NOT BALANCE" in said.out
    assert said.err.startswith("stopped: the ledger of")


def test_a_run_that_ended_early_is_told_as_of_its_last_checkpoint(run_dir: Path) -> None:
    ledger = Ledger()
    for group_id in range(6):
        ledger.admit(group_id)
    for group_id in (0, 1, 3):
        ledger.train(group_id)
    ledger.drop(2, "filtered")
    write_summary(run_dir, 5, None, "failed")
    write_metrics(run_dir, 1, 2, 3)
    write_checkpoint(run_dir, 2, ledger, [4, 5])
    account = read_account(run_dir)
    assert (account.step, account.source) == (2, "checkpoints/step-000002")
    assert account.facts() == account.facts() | {"admitted": 6, "trained": 3, "filtered": 1, "in_flight": 2}
    # A summary that an earlier part of the run has left is behind the checkpoint.
    write_summary(run_dir, 1, COUNTS)
    assert read_account(run_dir).step == 2


def test_a_checkpoint_that_counts_a_group_twice_is_refused(run_dir: Path) -> None:
    ledger = Ledger()
    ledger.admit(0)
    ledger.train(0)
    write_checkpoint(run_dir, 1, ledger, [0])
    with pytest.raises(RunError, match=r"does not add up: group 0 has ended already"):
        read_account(run_dir)


def test_a_living_run_is_told_as_of_its_last_step(run_dir: Path) -> None:
    write_summary(run_dir, 9, COUNTS)
    write_metrics(run_dir, 1, 2)
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        account = read_account(run_dir)
    assert (account.step, account.source) == (2, "the run is under way")
    assert account.counts == {"admitted": 4, "trained": 3, "in_flight": 0, "dropped/filtered": 1} | {
        "dropped": {"filtered": 1}
    }
    assert account.balances
    assert read_account(run_dir).step == 9


def test_a_folder_without_a_ledger_says_so(tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(UserError, match="has no ledger yet: it ended before its first checkpoint"):
        read_account(run_dir)
    with pytest.raises(UserError, match="is no run's folder"):
        read_account(tmp_path / "nowhere")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["train", "filtered", "invalid:x", "too_stale", "stay"]), max_size=30))
def test_what_a_ledger_says_of_itself_always_balances(outcomes: list[str]) -> None:
    ledger = Ledger()
    for group_id, outcome in enumerate(outcomes):
        ledger.admit(group_id)
        if outcome == "train":
            ledger.train(group_id)
        elif outcome != "stay":
            ledger.drop(group_id, outcome)
    account = Account(1, "", ledger.counts())
    facts = account.facts()
    ended = facts["trained"] + facts["filtered"] + facts["too_stale"] + sum(facts["invalid"].values())
    assert account.balances
    assert ended + outcomes.count("stay") == facts["admitted"] == len(outcomes)
