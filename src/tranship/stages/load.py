"""How much a sampler still has to do, as predicted, and how fast it is: what it says when it asks for more."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from tranship.dock.messages import Load
from tranship.types import SampleId

# Of what a sample has made, where it has outlived its prediction: so much more is expected of it.
_OUTLIVED = 0.25
# The speed is a mean over about so many tokens.
_HORIZON_TOKENS = 20_000


class LoadMeter:
    """Of one engine. Once their group has begun, samples get a slot in the order in which they came; a running one
    makes a token a step. max_response_tokens: no sample is longer.
    """

    def __init__(self, max_response_tokens: int) -> None:
        self._cap = max_response_tokens
        self._slots = 1
        self._steps = 0
        self._expected: dict[SampleId, int] = {}
        self._waiting: deque[SampleId] = deque()
        self._begun: dict[SampleId, int] = {}
        self._weight = self._seconds = 0.0

    def add(self, samples: Sequence[SampleId], expected_tokens: int) -> None:
        """Samples were submitted."""
        self._expected |= dict.fromkeys(samples, min(expected_tokens, self._cap))

    def begin(self, samples: Iterable[SampleId]) -> None:
        """The engine works on the first of these samples; the others follow as slots get free."""
        self._waiting.extend(sample for sample in samples if sample in self._expected)
        self._fill()

    def stepped(self, seconds: float) -> None:
        """Every running sample has made a token, in so many seconds."""
        self._steps += 1
        count = len(self._begun)
        if not count or seconds <= 0:
            return
        # Weighted by tokens, so that a speed with few samples at the end of a batch counts little.
        keep = max(0.0, 1.0 - count / _HORIZON_TOKENS)
        self._weight = keep * self._weight + count
        self._seconds = keep * self._seconds + count * seconds

    def remove(self, samples: Iterable[SampleId]) -> None:
        """Samples have ended, or were stopped; those that are not here are passed over."""
        for sample in samples:
            self._expected.pop(sample, None)
            if self._begun.pop(sample, None) is None and sample in self._waiting:
                self._waiting.remove(sample)
        self._fill()

    def clear(self) -> None:
        """Nothing runs any more."""
        self.remove(list(self._expected))

    def load(self, slots: int) -> Load:
        """What is left to do. slots: of the engine; fewer than were said before change nothing."""
        self._slots = max(self._slots, slots)
        tokens = sum(self._left(sample) for sample in self._expected)
        return Load(tokens, self._slots, self._weight / self._seconds if self._seconds else None)

    def _left(self, sample: SampleId) -> float:
        made = self._steps - self._begun.get(sample, self._steps)
        return max(0.0, min(self._cap - made, max(self._expected[sample] - made, _OUTLIVED * made)))

    def _fill(self) -> None:
        for _ in itertools.repeat(None, min(len(self._waiting), self._slots - len(self._begun))):
            self._begun[self._waiting.popleft()] = self._steps
