"""A picture of reward (or loss) and validation over the steps, from metrics.jsonl. Needs the extra `plot`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tranship.observe.jsonl import read_jsonl

_REWARD = "critic/score/mean"
_LOSS = "actor/loss"
_SCORES = {"val/score": "validation, sampled", "val/score_greedy": "validation, greedy"}
_COLORS = ("tab:blue", "tab:orange", "tab:green")


class Line(NamedTuple):
    """One line of the picture. unit: what its axis is called."""

    label: str
    unit: str
    steps: list[int]
    values: list[float]


def curve_lines(rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The lines that rows of metrics.jsonl give: rewards, or the loss where nothing was scored (SFT, DPO); then the
    validations that there are."""
    reward = _line(rows, _REWARD, "reward of training samples", "mean score")
    trained = reward if reward.steps else _line(rows, _LOSS, "loss of training samples", "loss")
    return [
        trained,
        *(line for name, label in _SCORES.items() if (line := _line(rows, name, label, "mean score")).steps),
    ]


def draw_curve(run_dir: Path, say: Callable[[str], None] = print) -> Path | None:
    """Write RUN/curve.png and return its path. A run goes without it, and `say` is told why, where matplotlib is
    missing or there is no step to draw."""
    if importlib.util.find_spec("matplotlib") is None:
        say('no curve.png without matplotlib: pip install "tranship[plot]"')
        return None
    rows = list(read_jsonl(run_dir / "metrics.jsonl"))
    if not rows:
        say("no curve.png: no step was completed")
        return None
    # The Agg canvas by hand: pyplot would look for a display and keep global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(xlabel="step", title=run_dir.resolve().name)
    axes.grid(alpha=0.3)
    by_unit: dict[str, Any] = {}
    for line, color in zip(curve_lines(rows), _COLORS, strict=False):
        if line.unit not in by_unit:
            # A loss and a score have no scale in common.
            by_unit[line.unit] = axes.twinx() if by_unit else axes
            by_unit[line.unit].set_ylabel(line.unit)
        trained = color == _COLORS[0]
        form = {"linewidth": 1.5} if trained else {"marker": "o", "linestyle": "--"}
        by_unit[line.unit].plot(line.steps, line.values, color=color, label=line.label, **form)
    figure.legend(loc="outside lower center", ncols=3)
    path = run_dir / "curve.png"
    temporary = run_dir / "curve.part.png"
    figure.savefig(temporary, dpi=150)
    temporary.replace(path)
    return path


def _line(rows: Sequence[Mapping[str, Any]], name: str, label: str, unit: str) -> Line:
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return Line(label, unit, [step for step, _ in found], [value for _, value in found])
