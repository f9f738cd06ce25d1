"""`tranship bench rollout`: generation by the native engine beside vLLM, transformers' `generate` and the ceiling.

Every side runs in a process of its own that stays up for a case (a model in a dtype); the sides alternate, each batch
size is warmed up once. A figure is the median over the rounds of the ratio within a round. What a side makes is
compared with a plain forward pass before anything is timed, and counted in every round.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tranship.bench.report import Bar, Report
from tranship.bench.rollout_sides import SIDES, Sides, peer_python, start
from tranship.bench.rollout_work import Case
from tranship.models.catalog import CATALOG, get
from tranship.models.tiny import make_tiny
from tranship.types import RunError, UserError

_ALL = (8, 32, 64, 128)
WORKLOADS: Mapping[str, Case] = {
    "fp32": Case("smollm2-135m", "fp32", _ALL),
    "bf16": Case("smollm2-135m", "bf16", _ALL),
    "tiny": Case("llama", "fp32", _ALL),
    "tiny_bf16": Case("llama", "bf16", _ALL),
    "tiny_moe": Case("qwen3_moe", "fp32", (32, 64)),
    "tiny_mla": Case("deepseek_v3", "fp32", (32, 64)),
}
_QUICK = ("tiny",)
_QUICK_BATCHES = (8, 32)
_GENERATE_BATCHES = (32, 64)
_COLD_STARTS = 3
_QUIET_LOAD = 0.5

BARS = {
    **{
        f"vs_vllm_{what}_b{batch}{end}": Bar("at least", value)
        for end in ("", "_bf16")
        for what, value in (("e2e", 1.3), ("decode", 1.25))
        for batch in _ALL
    },
    "vs_generate_e2e_b32": Bar("at least", 5.0),
    "vs_generate_e2e_b64": Bar("at least", 5.5),
    "fraction_of_ceiling_b32": Bar("at least", 0.75),
    "fraction_of_ceiling_b64": Bar("at least", 0.75),
    "cold_start_vs_vllm": Bar("at most", 0.3),
    "logprob_gap_max": Bar("at most", 1e-4),
    "update_vs_memcpy": Bar("at most", 3.0),
}
# Of one round: (side, batch) -> what the side answered.
Round = dict[tuple[str, int], dict[str, Any]]


def main(quick: bool, json_file: Path | None, workloads: str = "", sides: str = "", rounds: int | None = None) -> int:
    """Run the benchmark, print its tables, write json_file (after every workload); returns 0.

    workloads: some of WORKLOADS (empty: all, tiny with quick). sides: some of SIDES (empty: all; with quick
    without vllm, whose start alone takes half a minute). rounds: None for 5, or 2 with quick.
    """
    names = _chosen(workloads or ",".join(_QUICK if quick else WORKLOADS), tuple(WORKLOADS), "workloads")
    chosen = _chosen(sides or ",".join(side for side in SIDES if not quick or side != "vllm"), SIDES, "sides")
    if "native" not in chosen:
        raise UserError("bench rollout: sides must have native, which everything is compared with")
    num_rounds = rounds or (2 if quick else 5)
    terminal = Console()
    report = Report("bench rollout (ratios are generated tokens per second, native over the other)", BARS)
    if quick:
        report.notes.append("--quick: a tiny model and small batches; the bars are meant for the whole benchmark")
    _add_load(report, os.getloadavg()[0])
    with tempfile.TemporaryDirectory(prefix="tranship-bench-") as text:
        for name in names:
            case = WORKLOADS[name]
            if quick:
                case = replace(case, batches=_QUICK_BATCHES)
            terminal.print(f"{name}: {case.describe()}", highlight=False)
            model = _model(case.model, Path(text))
            end = "" if name == "fp32" else f"_{name}"
            done = run_case(case, model, end, chosen, num_rounds, Path(text), report)
            add_figures(report, case, end, done)
            _print_case(name, case, done, terminal)
            if name == "fp32" and {"native", "vllm"} <= set(chosen) and peer_python().exists():
                _add_cold_start(report, case, model, Path(text))
            if json_file is not None:
                report.write(json_file)
    _add_missing(report, names)
    report.print(terminal)
    if json_file is not None:
        report.write(json_file)
    return 0


def _add_load(report: Report, load: float) -> None:
    """load_average: processes that wanted to run before the benchmark began, with a note if there were any."""
    report.add("load_average", [load])
    if load > _QUIET_LOAD:
        report.notes.append(
            f"the machine was busy (load average {load:.1f} before the start): a side whose threads spin while they "
            "wait (vllm, generate) loses far more by that than one whose threads sleep; run it alone"
        )


def _chosen(text: str, known: Sequence[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UserError(f"bench rollout: {what} has no {name!r}; use some of: {', '.join(known)}")
    return names


def _model(name: str, folder: Path) -> Path:
    """The folder of a case's model."""
    if name in CATALOG:
        return get(name, log=lambda line: None)
    model = folder / name
    return model if model.is_dir() else make_tiny(model, name)


def run_case(
    case: Case, model: Path, end: str, chosen: Sequence[str], num_rounds: int, folder: Path, report: Report
) -> list[Round]:
    """The rounds of all sides that are there, after the check of what they make. Adds the figures that are not ratios
    of rounds: the log-prob gap and the update. end: of the figures' names."""
    sides = Sides(case, model, folder, report)
    try:
        sides.open(chosen)
        _check(sides, end, report)
        asked = [(side, batch) for batch in case.batches for side in chosen if _runs(side, batch)]
        for side, batch in asked:
            _measure(sides, side, batch, 1000 + batch)
        done = []
        for number in range(num_rounds):
            made = {key: _measure(sides, *key, 2000 + 1000 * number + key[1]) for key in asked}
            done.append({key: values for key, values in made.items() if values is not None})
        if case.dtype == "fp32":
            _add_update(report, sides, num_rounds, end)
        return done
    finally:
        sides.end()


def _runs(side: str, batch: int) -> bool:
    return side != "generate" or batch in _GENERATE_BATCHES


def _measure(sides: Sides, side: str, batch: int, seed: int) -> dict[str, Any] | None:
    if side == "ceiling":
        return sides.ask(side, do="measure", batch=batch)
    return sides.ask(side, do="generate", batch=batch, seed=seed)


def _check(sides: Sides, end: str, report: Report) -> None:
    """Compare what native and vllm make with a plain forward pass in fp32."""
    own = sides.there.get("generate") if sides.case.dtype == "fp32" else None
    fp32 = replace(sides.case, dtype="fp32")
    reference = own or start("generate", fp32, sides.model, sides.folder / "reference.log")[0]
    try:
        for side in ("native", "vllm"):
            gap = sides.check(side, reference)
            if gap is not None:
                report.add(f"logprob_gap_max{end}" if side == "native" else f"logprob_gap_max_{side}{end}", [gap])
    finally:
        if reference is not own:
            reference.end()


def _add_update(report: Report, sides: Sides, repeats: int, end: str) -> None:
    made = sides.ask("native", do="update", repeats=repeats)
    assert made is not None, "native fails with an error"
    copies = made["memcpy_s"]
    report.add(f"update_vs_memcpy{end}", [a / b for a, b in zip(made["transfer_s"], copies, strict=True)])
    report.add(f"repack_vs_memcpy{end}", [a / b for a, b in zip(made["repack_s"], copies, strict=True)])
    report.add(f"update_gb_per_s{end}", [made["bytes"] / 1e9 / seconds for seconds in made["transfer_s"]])


def add_figures(report: Report, case: Case, end: str, done: Sequence[Round]) -> None:
    """The figures that follow from a case's rounds; a round in which a side was not there gives none for it."""
    for batch in case.batches:
        for side, what in (("vllm", "e2e"), ("vllm", "decode"), ("generate", "e2e"), ("ceiling", "decode")):
            pairs = [(r[("native", batch)], r[(side, batch)]) for r in done if (side, batch) in r]
            if not pairs or len(pairs) < len(done):
                continue
            rates = [(_rate(ours, batch, what), _rate(theirs, batch, what)) for ours, theirs in pairs]
            # The ceiling is what the machine can do: noise only lowers it.
            highest = max(theirs for _, theirs in rates)
            ratios = [ours / (highest if side == "ceiling" else theirs) for ours, theirs in rates]
            report.add(
                (f"vs_{side}_{what}" if side != "ceiling" else "fraction_of_ceiling") + f"_b{batch}{end}", ratios
            )
        for side in SIDES:
            rounds = [r[(side, batch)] for r in done if (side, batch) in r]
            for what in ("e2e", "decode"):
                if rounds and _has(rounds[0], what):
                    values = [_rate(made, batch, what) for made in rounds]
                    report.add(f"tokens_per_s_{what}_{side}_b{batch}{end}", values)


def _has(made: Mapping[str, Any], what: str) -> bool:
    return "seconds" in made if what == "e2e" else "decode_ms" in made or "step_ms" in made


def _rate(made: Mapping[str, Any], batch: int, what: str) -> float:
    """Generated tokens per second, prefill included or of the median decode step."""
    if what == "e2e":
        return made["tokens"] / made["seconds"]
    return 1e3 * batch / made["decode_ms" if "decode_ms" in made else "step_ms"]


def _add_cold_start(report: Report, case: Case, model: Path, folder: Path) -> None:
    """Seconds from the command to the first token, native over vLLM."""
    ratios = []
    for number in range(_COLD_STARTS):
        seconds = {}
        for side in ("native", "vllm"):
            began = time.time()
            try:
                process, _ = start(side, case, model, folder / f"cold-{side}.log")
                seconds[side] = process.ask({"do": "first"}, 600.0)["now"] - began
                process.end()
            except RunError as error:
                if side == "native":
                    raise
                report.notes.append(f"cold_start_vs_vllm: round {number + 1}: {error}")
        if len(seconds) == 2:
            ratios.append(seconds["native"] / seconds["vllm"])
            report.rounds.setdefault("cold_start_s_native", []).append(seconds["native"])
            report.rounds.setdefault("cold_start_s_vllm", []).append(seconds["vllm"])
    if ratios:
        report.add("cold_start_vs_vllm", ratios)


def _add_missing(report: Report, names: Sequence[str]) -> None:
    """Say which figures with a bar the workloads that ran do not have."""
    for name in BARS:
        if name not in report.rounds and ("bf16" if name.endswith("_bf16") else "fp32") in names:
            report.add_missing(name, "the other side did not run, or failed in a round")


def _print_case(name: str, case: Case, done: Sequence[Round], terminal: Console) -> None:
    """Tokens per second of every side: end to end, and of the median decode step."""
    table = Table("batch", "side", "tokens/s", "decode tokens/s", title=f"{name}, medians", title_justify="left")
    for batch in case.batches:
        for side in SIDES:
            rounds = [r[(side, batch)] for r in done if (side, batch) in r]
            if rounds:
                texts = [
                    f"{statistics.median(_rate(made, batch, what) for made in rounds):,.0f}"
                    if _has(rounds[0], what)
                    else ""
                    for what in ("e2e", "decode")
                ]
                table.add_row(str(batch), side, *texts)
    terminal.print(table)
