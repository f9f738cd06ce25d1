"""Which functions make up a reward: their names, arguments and weights, and the sum of their scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tranship.rewards.scoring import invalid, sum_score
from tranship.types import Score, UserError

if TYPE_CHECKING:  # A worker that starts would wait for all of the settings to be built.
    from tranship.config import RewardConfig


@dataclass(frozen=True)
class Term:
    """One function of a reward. name: in metrics and reasons. setting: where the user named it, for errors."""

    name: str
    function: str
    args: dict[str, Any] = field(default_factory=dict)
    weight: float = 1.0
    setting: str = "reward.function"

    def to_message(self) -> dict[str, Any]:
        """Its fields, as JSON values."""
        return asdict(self)


def terms_of(reward: RewardConfig) -> tuple[Term, ...]:
    """The functions that a configuration asks for: reward.function (unless it is none), then reward.terms.

    Raises UserError where two have the same name.
    """
    terms = []
    if reward.function != "none":
        terms.append(Term(short_name(reward.function), reward.function, reward.args, reward.weight))
    for index, term in enumerate(reward.terms):
        name = term.name or short_name(term.function)
        terms.append(Term(name, term.function, term.args, term.weight, f"reward.terms[{index}].function"))
    for index, term in enumerate(terms):
        if term.name in (earlier.name for earlier in terms[:index]):
            raise UserError(f"{term.setting}: two rewards are called {term.name!r}: set name in reward.terms")
    return tuple(terms)


def short_name(function: str) -> str:
    """What a function is called in metrics: "exact_integer", "my.module:score" -> "score", a URL -> its last part."""
    if function.startswith(("http://", "https://")):
        return function.split("?")[0].rstrip("/").rpartition("/")[2]
    return function.rpartition(":")[2]


def combine(terms: Sequence[Term], scores: Sequence[Score | None]) -> Score:
    """The Score of a sample from those of its terms, in their order: the sum of weight x value.

    A score of None means that the term does not apply to the sample: it is left out; a sample to which no term applies
    is masked. The first term that is invalid (or masked) makes the sample invalid (or masked); scores may end with it.
    With one term its extra entries stay as they are and its reason too. With several, extra holds each term's own value
    under its name and its entries under name/entry, and a reason begins with the term's name: weights 1 and 0.5, values
    1 and 0.4 -> 1.2, {"a": 1.0, "b": 0.4}.
    """
    extra: dict[str, Any] = {}
    values: list[float] = []
    alone = len(terms) == 1
    for term, score in zip(terms, scores, strict=False):
        if score is None:
            continue
        extra |= score.extra if alone else {f"{term.name}/{key}": value for key, value in score.extra.items()}
        if score.status == "invalid":
            return invalid(score.reason if alone else f"{term.name}: {score.reason}", extra)
        if score.status == "masked":
            return Score("masked", extra=extra)
        assert score.value is not None
        values.append(term.weight * score.value)
        if not alone:
            extra[term.name] = score.value
    if not values:
        return Score("masked", extra=extra)
    return sum_score(values, extra)
