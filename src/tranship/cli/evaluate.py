"""`tranship eval`: scores of a model on held-out prompts, as a table and as a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tranship.cli.threads import let_idle_threads_sleep

_INTERRUPTED = 130
_PLAIN_WIDTH = 120
_PLAIN_LINES = 10


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model's folder or name, a run's folder, or one of its checkpoints.",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Put over the recipe: data.val.limit=100.", show_default=False),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="Says the prompts (data.val) and the reward; a run brings its own.", show_default=False),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(metavar="K", help="Samples of each prompt.", show_default=False)
    ] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="0: greedy only.", show_default=False)] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Where all figures go, with the samples beside.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's content in place of the table.")] = False,
) -> int:
    """Score a model on held-out prompts.

    Gives mean, pass@k, best@k and maj@k with their 95% intervals, for each data source.
    """
    let_idle_threads_sleep()
    from tranship.trainer.evaluate import evaluate as run
    from tranship.trainer.evaluate import prepare

    prepared = prepare(model, recipe, overrides or (), samples=samples, temperature=temperature, out=out)
    with _Progress() as progress:
        for line in prepared.lines():
            progress.say(line)
        evaluated = run(prepared, progress)
    if evaluated is None:
        return _INTERRUPTED
    if as_json:
        print(json.dumps(evaluated.facts, indent=1, ensure_ascii=False))
    else:
        _show(evaluated.facts, prepared.out, prepared.samples_file)
    return 0


class _Progress:
    """A bar on a terminal, some lines elsewhere; on standard error, for standard output may be the JSON."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # No thread of its own would get to draw while this process samples: each call draws.
        self._bar = Progress(*columns, console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._task = self._bar.add_task("prompts", total=None) if self._bar else None
        self._said = 0

    def __enter__(self) -> _Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """One line for people."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` groups of samples are scored."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=done, total=total, refresh=True)
        elif total and done * _PLAIN_LINES // total > self._said:
            self._said = done * _PLAIN_LINES // total
            self.say(f"scored    {done} of {total} groups of samples")


def _show(facts: Mapping[str, Any], out: Path, samples_file: Path) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    plain = Console()
    console = plain if plain.is_terminal else Console(width=_PLAIN_WIDTH)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for name in ("source", "statistic", "value", "95% interval", "prompts"):
        table.add_column(name, justify="left" if name in ("source", "statistic") else "right")
    for row in _rows(facts):
        table.add_row(*row)
    console.print(table)
    for name, value in facts["extra"].items():
        console.print(f"{name}: {value:.4f} on average", markup=False, highlight=False)
    for reason, count in facts["invalid"].items():
        console.print(f"invalid: {count} x {reason}", markup=False, highlight=False, soft_wrap=True)
    if facts["masked"]:
        console.print(f"masked: {facts['masked']} samples, which enter no mean", markup=False, highlight=False)
    for line in (*facts["notes"], f"figures   {out}", f"samples   {samples_file}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """One row a statistic: of each source, then of all where there are several."""
    sources = dict(facts["sources"])
    if len(sources) > 1:
        sources["(all)"] = {"sampled": facts["sampled"], "greedy": facts["greedy"]}
    for source, found in sources.items():
        estimates = _distinct(found["sampled"])
        estimates |= {f"greedy {name}": estimate for name, estimate in _distinct(found["greedy"]).items()}
        for name, e in estimates.items():
            interval = "-" if e["low"] is None else f"{e['low']:.4f} to {e['high']:.4f}"
            yield source, name, f"{e['value']:.4f}", interval, str(e["num_prompts"])


def _distinct(estimates: Mapping[str, Any]) -> dict[str, Any]:
    """Without what says the same twice: where scores are 0 and 1, best@k is pass@k, and pass@1 the mean."""
    shown: dict[str, Any] = {}
    for name, estimate in estimates.items():
        kind, _, count = name.partition("@")
        twin = next(iter(shown), "") if name == "pass@1" else f"pass@{count}" if kind == "best" else ""
        if twin not in shown or not math.isclose(estimate["value"], shown[twin]["value"], abs_tol=1e-9):
            shown[name] = estimate
    return shown
