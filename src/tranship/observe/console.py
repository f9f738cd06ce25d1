"""What a person sees while a run goes on: a live view on a terminal, one line per step elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from rich.console import Console

from tranship.observe.live import LiveView
from tranship.observe.record import StepRecord, ValidationRecord
from tranship.observe.words import duration, step_line, validation_line


class View(Protocol):
    """Shows; keeps nothing that matters."""

    def step(self, record: StepRecord, metrics: Mapping[str, float]) -> None:
        """A batch was trained on."""
        ...

    def validation(self, record: ValidationRecord) -> None:
        """Held-out prompts were scored."""
        ...

    def say(self, text: str) -> None:
        """One line from the coordinator."""
        ...

    def close(self, status: str) -> None:
        """The end; the terminal is left as it was found."""
        ...


class PlainView:
    """One line per step, flushed, without control characters."""

    def __init__(self, terminal: Console, total_steps: int) -> None:
        self._terminal = terminal
        self._total_steps = total_steps
        self._seconds: list[float] = []

    def step(self, record: StepRecord, metrics: Mapping[str, float]) -> None:
        """Print the step's line."""
        self._seconds = [*self._seconds[-4:], record.seconds]
        left = (self._total_steps - record.step) * sum(self._seconds) / len(self._seconds)
        self.say(f"{step_line(record, metrics, self._total_steps)}  left {duration(left)}")

    def validation(self, record: ValidationRecord) -> None:
        """Print the validation's line."""
        self.say(validation_line(record))

    def say(self, text: str) -> None:
        """Print the text as it is."""
        self._terminal.print(text, markup=False, highlight=False, soft_wrap=True)
        self._terminal.file.flush()

    def close(self, status: str) -> None:
        """Print how the run ended."""
        self.say(f"end: {status}")


class NoView:
    """Shows nothing."""

    def step(self, record: StepRecord, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def validation(self, record: ValidationRecord) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def close(self, status: str) -> None:
        """Nothing."""


def make_view(
    mode: Literal["auto", "live", "plain", "off"], terminal: Console | None, total_steps: int, title: str
) -> View:
    """The view of a mode; auto is live on a terminal and plain elsewhere."""
    if mode == "off":
        return NoView()
    shown = terminal or Console()
    if mode == "live" or (mode == "auto" and shown.is_terminal):
        return LiveView(shown, total_steps, title)
    return PlainView(shown, total_steps)
