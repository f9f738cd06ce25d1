"""`tranship ledger RUN`: what became of every group that a run has admitted, and whether it adds up (I1)."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tranship.types import RunError, UserError

_HEAD = "ledger/"


@dataclass(frozen=True)
class Account:
    """A run's ledger as of a trained step. source: where it was read. counts: as `Dock.ledger_counts`."""

    step: int
    source: str
    counts: Mapping[str, Any]

    @property
    def balances(self) -> bool:
        """Whether admitted = trained + dropped + in flight."""
        counts = self.counts
        return counts["admitted"] == counts["trained"] + sum(counts["dropped"].values()) + counts["in_flight"]

    def facts(self) -> dict[str, Any]:
        """The counts by their names; other: reasons of none of the kinds."""
        dropped = dict(self.counts["dropped"])
        facts = {name: self.counts[name] for name in ("admitted", "trained", "in_flight")}
        facts |= {"filtered": dropped.pop("filtered", 0), "too_stale": dropped.pop("too_stale", 0)}
        facts["invalid"] = {reason[8:]: dropped.pop(reason) for reason in list(dropped) if reason[:8] == "invalid:"}
        return {"step": self.step, "source": self.source, **facts, "other": dropped, "balances": self.balances}

    def lines(self) -> list[str]:
        """The same for people."""
        facts = self.facts()
        rows = [("admitted", facts["admitted"]), ("trained", facts["trained"]), ("filtered", facts["filtered"])]
        rows += [(f"invalid: {reason}", count) for reason, count in facts["invalid"].items()] or [("invalid", 0)]
        rows += [("too stale", facts["too_stale"]), *facts["other"].items(), ("in flight", facts["in_flight"])]
        width = max(len(str(count)) for _, count in rows)
        said = "balances: admitted = trained + filtered + invalid + too stale + in flight"
        return [
            f"groups of prompts, as of step {self.step} ({self.source})",
            *(f"{count:>{width}}  {name}" for name, count in rows),
            said if self.balances else "DOES NOT BALANCE",
        ]


def ledger(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> int:
    """Print what became of every prompt that a run has taken.

    Admitted = trained + filtered + invalid + too stale + in flight. Of a run that is under way: as of its last step; of
    one that ended early: as of its last checkpoint, from which it would go on.
    """
    account = read_account(run)
    print(json.dumps(account.facts(), indent=1) if as_json else "\n".join(account.lines()))
    if not account.balances:
        raise RunError(f"the ledger of {run} does not balance, as of step {account.step} ({account.source})")
    return 0


def read_account(run: Path) -> Account:
    """The ledger that counts now: of a living run that of its last step, else that of the summary or of the last
    checkpoint, whichever is further. Raises UserError where there is none."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is no run's folder (it has no config.yaml): give the run.dir of a run")
    living = _is_locked(run / ".lock")
    found = [_of_metrics(run)] if living else [_of_summary(run), _of_checkpoint(run)]
    accounts = [account for account in found if account is not None]
    if not accounts:
        wait = "wait for its first step" if living else "it ended before its first checkpoint"
        raise UserError(f"the run {run} has no ledger yet: {wait}")
    return max(accounts, key=lambda account: account.step)


def _is_locked(path: Path) -> bool:
    """Whether a living run holds its folder."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _of_metrics(run: Path) -> Account | None:
    from tranship.observe.jsonl import read_jsonl

    last = None
    for row in read_jsonl(run / "metrics.jsonl"):
        last = row if row["kind"] == "step" else last
    if last is None:
        return None
    counts = {name.removeprefix(_HEAD): int(value) for name, value in last.items() if name.startswith(_HEAD)}
    dropped = {name.removeprefix("dropped/"): count for name, count in counts.items() if name.startswith("dropped/")}
    return Account(last["step"], "the run is under way", {**counts, "dropped": dropped})


def _of_summary(run: Path) -> Account | None:
    summary = _read(run / "summary.json")
    if summary is None or not summary["ledger"]:
        return None
    return Account(summary["steps"], f"summary.json, {summary['status']}", summary["ledger"])


def _of_checkpoint(run: Path) -> Account | None:
    """From the state of the last checkpoint: what had ended, and the groups that are admitted again."""
    from tranship.dock import Ledger

    pointer = run / "checkpoints" / "latest"
    folder = pointer.parent / pointer.read_text().strip() if pointer.is_file() else None
    state = _read(folder / "state.json") if folder else None
    if folder is None or state is None:
        return None
    account = Ledger()
    try:
        account.restore(state["dock"]["ledger"])
        for group_id, _ in state["dock"]["in_flight"]:
            account.admit(group_id)
        ended = len(list(account.ended_from(0)))
        assert ended == account.admitted - account.in_flight, f"{ended} groups have ended, and it says {account}"
    except (AssertionError, LookupError, TypeError) as error:
        raise RunError(f"the ledger in {folder / 'state.json'} does not add up: {error}") from error
    return Account(state["version"], f"checkpoints/{folder.name}", account.counts())


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): restore it, or remove it") from error
