"""The live view: a small panel that is redrawn after each step. No thread of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tranship.observe.record import StepRecord, ValidationRecord
from tranship.observe.words import duration, number, of_recorded, percent, sparkline

_BAR_WIDTH = 28
_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")


class LiveView:
    """Step, reward, groups with signal, lengths, speed, time by stage, staleness, gap, validation, time left; the loss
    in place of the reward and what goes with it where nothing is scored."""

    def __init__(self, terminal: Console, total_steps: int, title: str) -> None:
        self._total_steps = total_steps
        self._title = title
        self._began = time.monotonic()
        self._rewards: list[float] = []
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._validations: list[ValidationRecord] = []
        self._last: tuple[StepRecord, Mapping[str, float]] | None = None
        self._invalid = 0
        self._live = Live(self._panel("starting"), console=terminal, auto_refresh=False)
        self._live.start()

    def step(self, record: StepRecord, metrics: Mapping[str, float]) -> None:
        """Redraw with the step's numbers."""
        self._last = (record, metrics)
        self._seconds = [*self._seconds[-4:], record.seconds]
        self._invalid += sum(record.invalid_by_reason.values())
        if "critic/score/mean" in metrics:
            self._rewards.append(metrics["critic/score/mean"])
        if math.isfinite(metrics.get("actor/loss", math.nan)):
            self._losses.append(metrics["actor/loss"])
        self._draw("training")

    def validation(self, record: ValidationRecord) -> None:
        """Redraw with the validation's scores."""
        self._validations.append(record)
        self._draw("training")

    def say(self, text: str) -> None:
        """Print a line above the panel."""
        self._live.console.print(text, markup=False, highlight=False)

    def close(self, status: str) -> None:
        """Leave the last panel on the screen and give the terminal back."""
        self._draw(status)
        self._live.stop()

    def _draw(self, status: str) -> None:
        self._live.update(self._panel(status), refresh=True)

    def _panel(self, status: str) -> RenderableType:
        rows: list[RenderableType] = [self._progress(status)]
        if self._last:
            record, metrics = self._last
            numbers = self._numbers(record, metrics) if record.has_rewards else self._recorded(metrics)
            rows += [numbers, self._time(record)]
        if self._validations:
            rows.append(self._validation())
        return Panel(Group(*rows), title=f"tranship · {self._title}", title_align="left", expand=False, width=92)

    def _progress(self, status: str) -> RenderableType:
        done = self._last[0].step if self._last else 0
        left = (self._total_steps - done) * sum(self._seconds) / len(self._seconds) if self._seconds else 0.0
        line = Table.grid(padding=(0, 2))
        elapsed = duration(time.monotonic() - self._began)
        bar = ProgressBar(total=self._total_steps, completed=done, width=_BAR_WIDTH)
        line.add_row(f"step {done}/{self._total_steps}", bar, status, f"{elapsed} gone", f"{duration(left)} left")
        return line

    def _numbers(self, record: StepRecord, metrics: Mapping[str, float]) -> RenderableType:
        get = metrics.get
        table = Table.grid(padding=(0, 2))
        reward = f"{number(get('critic/score/mean'))}  {sparkline(self._rewards, _BAR_WIDTH)}"
        signal = f"{record.num_groups_with_signal} of {record.num_groups} groups"
        length = f"{number(get('response_length/mean'), '.1f')} mean, {number(get('response_length/max'), '.0f')} max"
        cut = f"{percent(get('response_length/clip_ratio'))} cut"
        table.add_row("reward", reward, "signal", signal)
        table.add_row("length", f"{length}, {cut}", "speed", f"{get('perf/generated_tokens_per_s', 0):.0f} tokens/s")
        stale = f"{number(get('staleness/mean'), '.2f')} mean, {number(get('staleness/max'), '.0f')} max"
        table.add_row("staleness", stale, "log-prob gap", f"{number(record.logprob_gap_max, '.1e')} max")
        if "env/turns" in metrics:
            calls = f"{number(get('env/tool_calls'), '.1f')} tool calls, {number(get('env/tool_errors'), '.1f')} failed"
            table.add_row("turns", f"{number(get('env/turns'), '.1f')} mean", "tools", calls)
        if self._invalid:
            table.add_row("invalid", f"{self._invalid} samples so far (samples.jsonl has the reasons)", "", "")
        return table

    def _recorded(self, metrics: Mapping[str, float]) -> RenderableType:
        """Of a batch of recorded responses, which has no rewards."""
        table = Table.grid(padding=(0, 2))
        loss = f"{number(metrics.get('actor/loss'), '.4f')}  {sparkline(self._losses, _BAR_WIDTH)}"
        table.add_row("loss", loss, "speed", f"{metrics.get('perf/throughput', 0):.0f} tokens/s")
        found = {"gradient": metrics.get("actor/grad_norm"), **of_recorded(metrics)}
        cells = [cell for name, value in found.items() for cell in (name, number(value))]
        for start in range(0, len(cells), 4):
            table.add_row(*cells[start : start + 4])
        return table

    def _time(self, record: StepRecord) -> RenderableType:
        """One bar of the step's wall time, a colour per stage."""
        whole = max(record.seconds, sum(record.timings_s.values()), 1e-9)
        bar, words = Text(), Text(f"{record.seconds:.1f} s  ")
        for index, (stage, seconds) in enumerate(record.timings_s.items()):
            color = _COLORS[index % len(_COLORS)]
            bar.append("█" * round(_BAR_WIDTH * seconds / whole), style=color)
            if seconds >= 0.01:
                words.append(f"{stage} {seconds:.1f}  ", style=color)
        table = Table.grid(padding=(0, 2))
        table.add_row("time", bar, words)
        return table

    def _validation(self) -> RenderableType:
        first, last = self._validations[0], self._validations[-1]
        table = Table.grid(padding=(0, 2))
        table.add_row("validation", "sampled", _change(first.score, last.score, len(self._validations)))
        if last.score_greedy is not None:
            table.add_row("", "greedy", _change(first.score_greedy, last.score_greedy, len(self._validations)))
        for name, value in last.extra.items():
            table.add_row("", name, _change(first.extra.get(name), value, len(self._validations)))
        return table


def _change(first: float | None, last: float | None, count: int) -> str:
    return percent(last) if count == 1 else f"{percent(first)} → {percent(last)}"
