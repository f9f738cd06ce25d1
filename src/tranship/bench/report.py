"""A benchmark's figures: medians of per-round ratios, a table for people, a flat JSON file for programs."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Column, Table

from tranship.observe.machine import machine, versions


@dataclass(frozen=True)
class Bar:
    """What a figure is to reach, and from which side."""

    kind: Literal["at least", "at most"]
    value: float

    def holds(self, figure: float) -> bool:
        """Whether the figure reaches it."""
        return figure >= self.value if self.kind == "at least" else figure <= self.value


@dataclass
class Report:
    """Figures by name: the values of the rounds; or why a figure was not measured."""

    title: str
    bars: Mapping[str, Bar] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    peers: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, values: Sequence[float]) -> None:
        """A figure: one value per round."""
        assert values, name
        self.rounds[name] = list(values)

    def add_missing(self, name: str, why: str) -> None:
        """A figure that was not measured."""
        self.missing[name] = why

    def to_json(self) -> dict[str, Any]:
        """Flat: name -> median, name_min, name_max; None where nothing was measured; machine, versions, repeats."""
        values: dict[str, Any] = {}
        for name, rounds in self.rounds.items():
            values[name] = statistics.median(rounds)
            if len(rounds) > 1:
                values |= {f"{name}_min": min(rounds), f"{name}_max": max(rounds)}
        values |= dict.fromkeys(self.missing)
        values["not_measured"] = self.missing
        values["repeats"] = max((len(rounds) for rounds in self.rounds.values()), default=0)
        values["machine"] = machine()
        values["versions"] = versions() | self.peers
        values["notes"] = self.notes
        return values

    def write(self, path: Path) -> None:
        """Write the JSON file, whole or not at all."""
        temporary = path.with_name(path.name + ".part")
        temporary.write_text(json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")
        os.replace(temporary, path)

    def print(self, terminal: Console) -> None:
        """The table: a line per figure with median, range and bar."""
        table = Table(
            Column("figure", no_wrap=True),
            "median",
            "min",
            "max",
            "rounds",
            "bar",
            title=self.title,
            title_justify="left",
        )
        for name, rounds in self.rounds.items():
            median = statistics.median(rounds)
            table.add_row(name, *map(_digits, (median, min(rounds), max(rounds))), str(len(rounds)), self._bar(name))
        for name in self.missing:
            table.add_row(name, "not measured", "", "", "", self._bar(name))
        terminal.print(table)
        for name, why in self.missing.items():
            terminal.print(f"{name}: not measured: {why}", markup=False, highlight=False)
        for note in self.notes:
            terminal.print(note, markup=False, highlight=False)

    def _bar(self, name: str) -> str:
        bar = self.bars.get(name)
        if bar is None:
            return ""
        text = f"{bar.kind} {_digits(bar.value)}"
        if name not in self.rounds:
            return text
        return f"{text}: {'yes' if bar.holds(statistics.median(self.rounds[name])) else 'no'}"


def _digits(value: float) -> str:
    """Three digits that count, at least the whole part."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
