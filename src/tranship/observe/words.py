"""Numbers of a step in words for people. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tranship.observe.record import StepRecord, ValidationRecord
from tranship.observe.scores import Estimate

_BARS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """0:45, 12:03, 3:05:09."""
    whole = max(0, round(seconds))
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def number(value: float | None, form: str = ".3f") -> str:
    """The number, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as blocks from the smallest to the largest of them."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in shown)


def percent(value: float | None) -> str:
    """0.125 as 12.5%."""
    return "-" if value is None else f"{100 * value:.1f}%"


def interval(estimate: Estimate | None) -> str:
    """` [78.1%, 89.2%]`: the 95% interval, or nothing where there is none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return f" [{percent(estimate.low)}, {percent(estimate.high)}]"


def stages(record: StepRecord) -> str:
    """`rollout 1.2, train 2.3`: seconds by stage, those below 10 ms left out."""
    return ", ".join(f"{name} {value:.1f}" for name, value in record.timings_s.items() if value >= 0.01)


def step_line(record: StepRecord, metrics: Mapping[str, float], total_steps: int) -> str:
    """One line for one step. Without rewards (recorded responses) it has the loss in their place."""
    if not record.has_rewards:
        return _recorded_line(record, metrics, total_steps)
    parts = [
        f"step {record.step}/{total_steps}",
        f"reward {number(metrics.get('critic/score/mean'))}",
        f"signal {record.num_groups_with_signal}/{record.num_groups}",
        f"length {number(metrics.get('response_length/mean'), '.1f')}",
        f"{number(metrics.get('perf/generated_tokens_per_s'), '.0f')} tokens/s",
        f"{record.seconds:.1f} s ({stages(record)})",
        f"stale {number(metrics.get('staleness/max'), '.0f')}",
        f"gap {number(record.logprob_gap_max, '.1e')}",
    ]
    if "env/turns" in metrics:
        parts.insert(4, f"turns {number(metrics['env/turns'], '.1f')}")
    invalid = record.invalid_by_reason
    if invalid:
        parts.append("invalid " + ", ".join(f"{reason} {count}" for reason, count in invalid.items()))
    return "  ".join(parts)


def of_recorded(metrics: Mapping[str, float]) -> dict[str, float]:
    """What there is to say of a batch of recorded responses besides its loss: name -> value."""
    shown = ("dpo/accuracy", "dpo/margin")
    return {name.rpartition("/")[2]: metrics[name] for name in shown if name in metrics}


def _recorded_line(record: StepRecord, metrics: Mapping[str, float], total_steps: int) -> str:
    parts = [
        f"step {record.step}/{total_steps}",
        f"loss {number(metrics.get('actor/loss'), '.4f')}",
        *(f"{name} {number(value)}" for name, value in of_recorded(metrics).items()),
        f"grad norm {number(metrics.get('actor/grad_norm'))}",
        f"{number(metrics.get('perf/throughput'), '.0f')} tokens/s",
        f"{record.seconds:.1f} s ({stages(record)})",
    ]
    return "  ".join(parts)


def validation_line(record: ValidationRecord) -> str:
    """One line for one validation."""
    num = record.samples_per_prompt
    found = record.statistics
    sampled = f"sampled {percent(record.score)}{interval(found.get(f'mean@{num}'))}"
    parts = [f"validation ({record.when}, step {record.step}): {sampled}"]
    if num > 1:
        parts += [f"{name} {percent(found[name].value)}" for name in (f"pass@{num}", f"maj@{num}") if name in found]
    if record.score_greedy is not None:
        parts.append(f"greedy {percent(record.score_greedy)}{interval(record.statistics_greedy.get('mean@1'))}")
    parts += [f"{name} {number(value)}" for name, value in record.extra.items()]
    return "  ".join([*parts, f"{record.num_prompts} prompts in {record.seconds:.1f} s"])
