"""The two views: what a person reads, and that neither writes control characters where there is no terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import pytest
from rich.console import Console

from tranship.observe.console import NoView, PlainView, make_view
from tranship.observe.live import LiveView
from tranship.observe.metrics import step_metrics
from tranship.observe.record import StepRecord, ValidationRecord
from tranship.observe.words import duration, sparkline

MakeStep = Callable[..., StepRecord]
MakeValidation = Callable[..., ValidationRecord]


def test_plain_is_one_line_per_step(step_record: MakeStep, validation_record: MakeValidation) -> None:
    out = io.StringIO()
    view = make_view("auto", Console(file=out, width=40), 10, "demo")
    assert isinstance(view, PlainView)
    view.validation(validation_record("before", 0, 0.125))
    record = step_record(3)
    view.step(record, step_metrics(record))
    view.close("finished")
    first, second, third = out.getvalue().splitlines()
    assert first == "validation (before, step 0): sampled 12.5%  greedy 25.0%  well_formed 0.500  8 prompts in 1.5 s"
    assert second == (
        "step 3/10  reward 0.667  signal 1/2  length 5.0  5 tokens/s  4.0 s (rollout 1.0, reward 0.5, train 2.0)  "
        "stale 0  gap 1.0e-05  left 0:28"
    )
    assert third == "end: finished"
    assert "\x1b" not in out.getvalue()


def test_plain_names_invalid_samples(step_record: MakeStep) -> None:
    out = io.StringIO()
    view = make_view("plain", Console(file=out), 10, "demo")
    record = step_record(1, statuses=("invalid",) * 4, reasons=("timeout", "timeout", "raised", "timeout"))
    view.step(record, step_metrics(record))
    assert "invalid timeout 3, raised 1" in out.getvalue()
    assert "reward -" in out.getvalue()


def test_live_shows_all_that_matters(step_record: MakeStep, validation_record: MakeValidation) -> None:
    out = io.StringIO()
    view = make_view("live", Console(file=out, force_terminal=True, width=100), 10, "demo")
    assert isinstance(view, LiveView)
    view.validation(validation_record("before", 0, 0.125))
    for step in (1, 2, 3):
        record = step_record(step)
        view.step(record, step_metrics(record))
    view.say("checkpoint of step 3")
    view.validation(validation_record("after", 3, 0.45))
    view.close("finished")
    shown = out.getvalue()
    for text in (
        "demo", "step 3/10", "0.667", "1 of 2 groups", "5.0 mean, 8 max", "25.0% cut", "5 tokens/s", "rollout 1.0",
        "1.0e-05 max", "12.5% → 45.0%", "25.0% → 90.0%", "0:28 left", "finished", "checkpoint of step 3",
    ):  # fmt: skip
        assert text in shown, text
    assert shown.rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_plain_shows_the_loss_where_nothing_is_scored(recorded_step: MakeStep) -> None:
    out = io.StringIO()
    view = make_view("plain", Console(file=out), 10, "demo")
    record = recorded_step(3, train={"loss": 0.6931, "grad_norm": 1.5, "num_tokens": 400, "pair_accuracy": 0.625})
    view.step(record, step_metrics(record))
    assert out.getvalue() == (
        "step 3/10  loss 0.6931  accuracy 0.625  grad norm 1.500  100 tokens/s  4.0 s (train 2.0)  left 0:28\n"
    )


def test_live_shows_the_loss_where_nothing_is_scored(recorded_step: MakeStep) -> None:
    out = io.StringIO()
    view = make_view("live", Console(file=out, force_terminal=True, width=100), 10, "demo")
    for step, loss in ((1, 2.0), (2, math.nan), (3, 1.0)):
        record = recorded_step(step, train={"loss": loss, "num_tokens": 400, "pair_margin": 0.25})
        view.step(record, step_metrics(record))
    view.close("finished")
    last = out.getvalue().rpartition("step 3/10")[2]
    for text in ("1.0000", "█▁", "100 tokens/s", "margin", "0.250"):
        assert text in last, text
    assert "reward" not in last
    assert "staleness" not in last


def test_turns_and_tools_are_shown(step_record: MakeStep) -> None:
    out = io.StringIO()
    record = step_record(1, rollout_extra={"turns": 2.5, "tool_calls": 1.25, "tool_errors": 0.5})
    for mode in ("plain", "live"):
        view = make_view(mode, Console(file=out, force_terminal=mode == "live", width=100), 10, "demo")
        view.step(record, step_metrics(record))
        view.close("finished")
    assert "length 5.0  turns 2.5  5 tokens/s" in out.getvalue()
    assert "1.2 tool calls, 0.5 failed" in out.getvalue()


def test_off_shows_nothing(step_record: MakeStep) -> None:
    out = io.StringIO()
    view = make_view("off", Console(file=out), 10, "demo")
    assert isinstance(view, NoView)
    view.step(step_record(1), {})
    view.say("hello")
    assert out.getvalue() == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (45, "0:45"), (723, "12:03"), (11109, "3:05:09")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sparkline_is_flat_for_equal_values_and_keeps_the_last() -> None:
    assert sparkline([1, 1, 1], 8) == "▁▁▁"
    assert sparkline([9, 0, 1], 2) == "▁█"
    assert sparkline([], 4) == ""
