"""Statistics of samples that were scored: mean@n, pass@k, best@k and maj@n, each with a 95% interval. Pure numpy.

Each of them is a mean over prompts of one number per prompt. Samples of one prompt resemble each other, so what is
uncertain is the choice of prompts, and the interval counts prompts, not samples (clustered standard errors, as
arXiv:2411.00640 recommends for questions that come in groups).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054  # The standard normal distribution lies within it with probability 0.95.
_T_OF_TWO_VALUES = 12.706204736432095


@dataclass(frozen=True)
class PromptScores:
    """The scored samples of one prompt; masked and invalid ones are not among them.

    scores: n numbers. correct: n, whether each counts as right. answers: n, what the reward read out of each response;
    None where it found nothing, or names no answers.
    """

    source: str
    scores: Sequence[float]
    correct: Sequence[bool]
    answers: Sequence[str | None]

    def __post_init__(self) -> None:
        assert len(self.scores) == len(self.correct) == len(self.answers), "columns of different lengths"


@dataclass(frozen=True)
class Estimate:
    """A mean over `num_prompts` prompts and its 95% interval; low and high are None where one prompt says nothing."""

    value: float
    low: float | None
    high: float | None
    num_prompts: int


def statistics(prompts: Sequence[PromptScores], num_samples: int) -> dict[str, Estimate]:
    """All statistics by name, for `num_samples` = n samples asked of each prompt.

    mean@n: the score, over all prompts with a scored sample. pass@k: the chance that one of k samples is right, for k
    in 1, 2, 4, ... below n, and n. best@k: the mean of the highest of k scores, for the same k but 1. maj@n: whether
    the answer that most samples gave is right; for n > 1, over the sources whose reward names answers. pass, best and
    maj are over the prompts that have enough scored samples: all of their n for maj. What no prompt can tell is left
    out.
    """
    with_any = [prompt for prompt in prompts if prompt.scores]
    unit = all(score in (0.0, 1.0) for prompt in with_any for score in prompt.scores)
    found = {f"mean@{num_samples}": estimate([float(np.mean(p.scores)) for p in with_any], unit=unit)}
    for k in sample_counts(num_samples):
        enough = [prompt for prompt in with_any if len(prompt.scores) >= k]
        found[f"pass@{k}"] = estimate([pass_at(len(p.correct), sum(p.correct), k) for p in enough], unit=True)
        if k > 1:
            found[f"best@{k}"] = estimate([best_at(p.scores, k) for p in enough], unit=unit)
    if num_samples > 1:
        voting = _sources_with_answers(prompts)
        complete = [p for p in with_any if p.source in voting and len(p.scores) >= num_samples]
        found[f"maj@{num_samples}"] = estimate([majority(p.answers, p.correct) for p in complete], unit=True)
    return {name: value for name, value in found.items() if value is not None}


def by_source(prompts: Sequence[PromptScores], num_samples: int) -> dict[str, dict[str, Estimate]]:
    """`statistics` of each data source by itself, sources in order."""
    sources = sorted({prompt.source for prompt in prompts})
    return {source: statistics([p for p in prompts if p.source == source], num_samples) for source in sources}


def why_no_majority(prompts: Sequence[PromptScores]) -> str:
    """Why no majority can be taken, in words for people; "" where one can."""
    return "" if _sources_with_answers(prompts) else 'no maj@k: the reward returns no "answer" beside the score'


def sample_counts(num_samples: int) -> list[int]:
    """1, 2, 4, ... below `num_samples`, and `num_samples`."""
    return [*(2**power for power in range((num_samples - 1).bit_length())), num_samples]


def pass_at(n: int, c: int, k: int) -> float:
    """The chance that k of n samples, drawn without replacement, hold one of the c right ones: 1 - C(n-c,k) / C(n,k).

    Unbiased for k independent samples of the model (arXiv:2107.03374, section 2.1). Exact: the binomials are integers.
    """
    assert 0 <= c <= n, (n, c)
    assert 1 <= k <= n, (n, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def best_at(scores: Sequence[float], k: int) -> float:
    """The expected highest of k of the n scores, drawn without replacement.

    The i-th smallest score (from 1) is the highest of C(i-1,k-1) of the C(n,k) subsets. For scores 0 and 1 this is
    `pass_at`.
    """
    n = len(scores)
    assert 1 <= k <= n, (n, k)
    weights = [math.comb(i - 1, k - 1) / math.comb(n, k) for i in range(k, n + 1)]
    return float(np.dot(weights, np.sort(np.asarray(scores, dtype=np.float64))[k - 1 :]))


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Whether the most frequent answer is right, in [0, 1]; a response without an answer has no vote.

    Answers with equally many votes share the decision: the mean of theirs, which is what drawing one of them would
    give on average, and does not depend on the samples' order. An answer that is right only in some responses (a form
    that is asked for, say) counts for that share of them. No votes at all: 0.
    """
    votes: dict[str, list[bool]] = {}
    for answer, right in zip(answers, correct, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(right)
    if not votes:
        return 0.0
    most = max(len(rights) for rights in votes.values())
    return float(np.mean([np.mean(rights) for rights in votes.values() if len(rights) == most]))


def estimate(values: Sequence[float], *, unit: bool) -> Estimate | None:
    """The mean of one number per prompt with its 95% interval; None for no numbers. unit: they lie in [0, 1] always.

    Numbers that are all 0 or 1: Wilson's score interval, which keeps its coverage near 0 and 1 and for few prompts,
    where a standard error is 0 or nearly so (Brown, Cai and DasGupta 2001, "Interval estimation for a binomial
    proportion"). Else Student's interval of the mean, cut at 0 and 1 where `unit`.
    """
    numbers = np.asarray(values, dtype=np.float64)
    num = len(numbers)
    if not num:
        return None
    mean = float(numbers.mean())
    if unit and bool(np.isin(numbers, (0.0, 1.0)).all()):
        low, high = _wilson(mean, num)
    elif num == 1:
        return Estimate(mean, None, None, 1)
    else:
        half = _student(num - 1) * float(numbers.std(ddof=1)) / math.sqrt(num)
        low, high = mean - half, mean + half
    if unit:
        low, high = max(0.0, low), min(1.0, high)
    return Estimate(mean, low, high, num)


def as_json(estimates: Mapping[str, Estimate]) -> dict[str, dict[str, float | int | None]]:
    """name -> {"value", "low", "high", "num_prompts"}."""
    return {
        name: {"value": e.value, "low": e.low, "high": e.high, "num_prompts": e.num_prompts}
        for name, e in estimates.items()
    }


def _sources_with_answers(prompts: Sequence[PromptScores]) -> set[str]:
    return {prompt.source for prompt in prompts if any(answer is not None for answer in prompt.answers)}


def _wilson(share: float, num: int) -> tuple[float, float]:
    spread = _Z * math.sqrt(share * (1 - share) / num + _Z**2 / (4 * num**2))
    middle, scale = share + _Z**2 / (2 * num), 1 + _Z**2 / num
    return (middle - spread) / scale, (middle + spread) / scale


def _student(freedom: int) -> float:
    """The 0.975 quantile of Student's t: exact for 1 degree of freedom, else within 1% (Abramowitz and Stegun,
    26.7.5)."""
    if freedom == 1:
        return _T_OF_TWO_VALUES
    z = _Z
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
