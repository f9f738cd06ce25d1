"""`tranship bench e2e`: a whole step of GRPO, ours beside a plain loop and TRL, on workloads W, T and L.

Every side runs in a fresh process of its own, the sides alternate, each process warms up for one step. A figure is the
median over the rounds of the ratio within a round. What a side made is checked before anything is compared.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tranship.bench.children import run_child
from tranship.bench.limit import matrix_shape, step_flops
from tranship.bench.report import Bar, Report
from tranship.bench.sides import SIDES, SIDES_OF, Round, check_same_prompts, run_round, trl_python
from tranship.bench.workloads import QUICK, WORKLOADS, Workload
from tranship.models.catalog import get
from tranship.types import RunError, UserError

_LIMIT_S = 120.0

BARS = {
    "vs_plain_loop": Bar("at least", 3.2),
    "vs_plain_loop_bf16": Bar("at least", 3.0),
    "vs_trl": Bar("at least", 5.0),
    "vs_plain_loop_L": Bar("at least", 2.0),
    "vs_plain_loop_T": Bar("at least", 1.3),
    "vs_trl_T": Bar("at least", 1.5),
    "fraction_of_limit": Bar("at least", 0.4),
    "peak_memory_vs_trl": Bar("at most", 0.4),
    "seconds_to_first_step": Bar("at most", 15.0),
    "dock_share": Bar("at most", 0.01),
}
# Figure -> (ours, the other side).
_RATIOS = {
    "vs_plain_loop": ("ours", "plain_loop"),
    "vs_plain_loop_bf16": ("ours_bf16", "plain_loop_bf16"),
    "vs_trl": ("ours", "trl"),
}
Rounds = Mapping[str, Sequence[Round]]


def main(quick: bool, json_file: Path | None, workloads: str = "", sides: str = "", rounds: int | None = None) -> int:
    """Run the benchmark, print its tables, write json_file; returns 0.

    workloads: some of W,T,L (empty: all; T with quick). sides: some of SIDES (empty: all; ours,plain_loop with
    quick). rounds: None for 5, or 2 with quick, whose workloads are smaller, so that it ends in a minute.
    """
    table = QUICK if quick else WORKLOADS
    names = _chosen(workloads or ("T" if quick else "W,T,L"), tuple(WORKLOADS), "workloads")
    chosen = _chosen(sides or ("ours,plain_loop" if quick else ",".join(SIDES)), SIDES, "sides")
    num_rounds = rounds or (2 if quick else 5)
    terminal = Console()
    report = Report("bench e2e (ratios are tokens per second of wall time, ours over the other)", BARS)
    if quick:
        report.notes.append("--quick: smaller workloads than the bars are meant for; figures show the direction only")
    with tempfile.TemporaryDirectory(prefix="tranship-bench-") as folder:
        for name in names:
            terminal.print(table[name].describe(), highlight=False)
            wanted = [side for side in SIDES_OF[name] if side in chosen]
            done = run_rounds(table[name], wanted, num_rounds, Path(folder), terminal, report)
            check_same_prompts(table[name], done)
            add_figures(report, table[name], done)
            if name == "W":
                _add_limit(report, table[name], done.get("ours", ()), Path(folder) / "limit")
            _print_sides(table[name], done, terminal)
    report.print(terminal)
    if json_file is not None:
        report.write(json_file)
    return 0


def _chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UserError(f"bench e2e: {what} has no {name!r}; use some of: {', '.join(known)}")
    return names


def run_rounds(
    workload: Workload, sides: Sequence[str], num_rounds: int, folder: Path, terminal: Console, report: Report
) -> dict[str, list[Round]]:
    """The rounds of every side that could run, alternating. A peer that is not there, or fails, is left out with a
    note; a side of ours that fails raises RunError."""
    done: dict[str, list[Round]] = {side: [] for side in sides}
    if "trl" in done and not trl_python().exists():
        del done["trl"]
        report.notes.append(f"TRL was not measured: {trl_python()} is not there (`make bench-env` makes it)")
    for number in range(num_rounds):
        for side in list(done):
            try:
                measured = run_round(side, workload, folder / f"{workload.name}-{side}", seed=number)
            except RunError as error:
                if side != "trl":
                    raise
                report.notes.append(f"TRL was not measured on {workload.name}: {error}")
                del done[side]
                continue
            done[side].append(measured)
            terminal.print(
                f"  round {number + 1}/{num_rounds}  {side:16} {measured.tokens_per_s:8.1f} tokens/s", highlight=False
            )
            if side == "trl":
                report.peers["trl"] = measured.versions["trl"]
    return done


def add_figures(report: Report, workload: Workload, done: Rounds) -> None:
    """The figures that follow from one workload's rounds."""
    end = "" if workload.name == "W" else f"_{workload.name}"
    for name, (ours, other) in _RATIOS.items():
        if other not in SIDES_OF[workload.name]:
            continue
        if done.get(ours) and done.get(other):
            pairs = zip(done[ours], done[other], strict=True)
            report.add(name + end, [a.tokens_per_s / b.tokens_per_s for a, b in pairs])
        else:
            report.add_missing(name + end, _absent(done, ours, other))
    if workload.name == "W":
        _add_figures_of_w(report, done)
    for side, rounds in done.items():
        tag = f"{workload.name}_{side}"
        report.add(f"tokens_per_s_{tag}", [r.tokens_per_s for r in rounds])
        report.add(f"peak_gib_{tag}", [r.peak_bytes / 2**30 for r in rounds])
        report.add(f"first_step_s_{tag}", [r.first_step_s for r in rounds])
        for stage in ("gen", "train"):
            report.add(f"{stage}_s_{tag}", [r.stage_seconds(stage) for r in rounds])


def _add_figures_of_w(report: Report, done: Rounds) -> None:
    ours, trl = done.get("ours"), done.get("trl")
    if ours and trl:
        report.add("peak_memory_vs_trl", [a.peak_bytes / b.peak_bytes for a, b in zip(ours, trl, strict=True)])
    else:
        report.add_missing("peak_memory_vs_trl", _absent(done, "ours", "trl"))
    if not ours:
        for name in ("seconds_to_first_step", "dock_share"):
            report.add_missing(name, _absent(done, "ours"))
        return
    report.add("seconds_to_first_step", [r.first_step_s for r in ours])
    report.add("dock_share", [sum(step["dock_share"] for step in r.steps) / len(r.steps) for r in ours])
    gaps = [step["logprob_gap_max"] for r in ours for step in r.steps if step["logprob_gap_max"] is not None]
    if gaps:
        report.add("logprob_gap_max", gaps)


def _absent(done: Rounds, *sides: str) -> str:
    return f"{' and '.join(side for side in sides if not done.get(side))} did not run"


def _add_limit(report: Report, workload: Workload, ours: Sequence[Round], folder: Path) -> None:
    """fraction_of_limit: our tokens/s over those that the step's products alone allow, at the rate of this run."""
    if not ours:
        report.add_missing("fraction_of_limit", "ours did not run")
        return
    command = [sys.executable, "-m", "tranship.bench.limit"]
    rate = run_child(command, {"dtypes": ["fp32", "bf16"]}, folder, _LIMIT_S).values
    shape = matrix_shape(get(workload.model, log=lambda line: None))
    fractions = []
    for measured in ours:
        distinct = sum(step["prompt_tokens"] for step in measured.steps) // workload.group_size
        prompts = workload.num_prompts * len(measured.steps)
        flops = step_flops(shape, distinct, prompts, measured.tokens)
        fractions.append(flops / rate["fp32"] / measured.seconds)
    report.add("fraction_of_limit", fractions)
    report.add("gemm_gflops_fp32", [rate["fp32"] / 1e9])
    report.add("gemm_gflops_bf16", [rate["bf16"] / 1e9])


def _print_sides(workload: Workload, done: Rounds, terminal: Console) -> None:
    """A line per side: what its median round was like."""
    table = Table("side", "tokens/s", "step s", "gen s", "train s", "peak GiB", "first step s")
    for side, rounds in done.items():
        middle = sorted(rounds, key=lambda r: r.tokens_per_s)[len(rounds) // 2]
        table.add_row(
            side,
            f"{middle.tokens_per_s:,.1f}",
            f"{middle.seconds / len(middle.steps):.2f}",
            f"{middle.stage_seconds('gen'):.2f}",
            f"{middle.stage_seconds('train'):.2f}",
            f"{middle.peak_bytes / 2**30:.2f}",
            f"{middle.first_step_s:.1f}",
        )
    table.title, table.title_justify = f"{workload.name}, the median round", "left"
    terminal.print(table)
