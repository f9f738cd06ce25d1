"""A picture of reward and validation over the steps, from metrics.jsonl. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tranship.observe.jsonl import read_jsonl

_REWARD = "critic/score/mean"
_VALIDATION = {"val/score": "validation, sampled", "val/score_greedy": "validation, greedy"}


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
    axes.plot(*_series(rows, _REWARD), color="tab:blue", linewidth=1.5, label="reward of training samples")
    for (name, label), color in zip(_VALIDATION.items(), ("tab:orange", "tab:green"), strict=True):
        steps, values = _series(rows, name)
        if steps:
            axes.plot(steps, values, color=color, marker="o", linestyle="--", label=label)
    axes.set(xlabel="step", ylabel="mean score", title=run_dir.resolve().name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = run_dir / "curve.png"
    temporary = run_dir / "curve.part.png"
    figure.savefig(temporary, dpi=150)
    temporary.replace(path)
    return path


def _series(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """The steps that have the metric, and its values there."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]
