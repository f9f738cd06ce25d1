"""How long responses will be: predicted from earlier ones to the same prompt, else from all of the run."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# Of a mean that follows the policy: the part of the newest group.
_NEW = 0.3


class LengthForecast:
    """Means of lengths that follow the policy as it changes. max_response_tokens: what is predicted at first, and the
    most that ever is."""

    def __init__(self, max_response_tokens: int) -> None:
        self._cap = max_response_tokens
        self._of_prompt: dict[Hashable, float] = {}
        self._of_run: float | None = None

    def observe(self, prompt: Hashable, lengths: Sequence[int]) -> None:
        """The responses of a group were so long, in tokens."""
        if lengths:
            mean = sum(lengths) / len(lengths)
            self._of_prompt[prompt] = _follow(self._of_prompt.get(prompt), mean)
            self._of_run = _follow(self._of_run, mean)

    def expect(self, prompt: Hashable) -> int:
        """Tokens of a response to come."""
        known = self._of_prompt.get(prompt, self._of_run)
        return self._cap if known is None else max(1, min(self._cap, round(known)))


def _follow(before: float | None, new: float) -> float:
    return new if before is None else before + _NEW * (new - before)
