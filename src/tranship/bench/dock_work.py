"""The work of `bench dock`: ragged rows that every side moves. Imports numpy alone, since peers load it from its file.

A row's content depends on its number alone, so that whoever receives it can check it without asking anybody.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

COLUMNS = ("prompt", "response", "logprobs", "ref_logprobs", "advantages", "reward")
RAGGED = COLUMNS[:-1]


@dataclass(frozen=True)
class Setting:
    """One configuration: that many processes put, that many get, `batch` rows in all with up to `longest` tokens."""

    producers: int
    consumers: int
    batch: int
    longest: int

    @property
    def name(self) -> str:
        """As in the figures: "4x4"."""
        return f"{self.producers}x{self.consumers}"

    def share(self, place: int) -> range:
        """The numbers of the rows that a producer (or consumer) of that place moves."""
        each = self.batch // self.producers
        return range(place * each, (place + 1) * each)


def row(number: int, longest: int) -> dict[str, Any]:
    """The columns of one row: prompt U[L/32, L/8], response U[L/4, L] tokens; five arrays and a scalar."""
    rng = np.random.default_rng(number)
    num_prompt = int(rng.integers(longest // 32, longest // 8 + 1))
    num_response = int(rng.integers(longest // 4, longest + 1))
    return {
        "prompt": rng.integers(0, 1 << 16, num_prompt, dtype=np.int32),
        "response": rng.integers(0, 1 << 16, num_response, dtype=np.int32),
        "logprobs": rng.random(num_response, dtype=np.float32),
        "ref_logprobs": rng.random(num_response, dtype=np.float32),
        "advantages": rng.random(num_response, dtype=np.float32),
        "reward": np.float32(number % 1000),
    }


def rows(numbers: range, longest: int) -> dict[str, list[Any]]:
    """The columns of some rows, a list of values each."""
    made = [row(number, longest) for number in numbers]
    return {column: [one[column] for one in made] for column in COLUMNS}


def check(numbers: list[int], columns: dict[str, Any], longest: int) -> None:
    """Assert that received columns (sequences of one value per row) are those of these rows, bit for bit."""
    assert set(columns) == set(COLUMNS), sorted(columns)
    for column, values in columns.items():
        assert len(values) == len(numbers), f"{column}: {len(values)} values for {len(numbers)} rows"
    for place, number in enumerate(numbers):
        expected = row(number, longest)
        for column in COLUMNS:
            found = np.asarray(columns[column][place]).reshape(-1)
            wanted = np.asarray(expected[column]).reshape(-1)
            same = found.dtype == wanted.dtype and np.array_equal(found, wanted)
            assert same, f"row {number}: {column} is not what was put"


def nbytes_of(columns: dict[str, list[Any]]) -> int:
    """Bytes of the values."""
    return sum(np.asarray(value).nbytes for values in columns.values() for value in values)


def now() -> float:
    """Seconds of a clock that all processes of the machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def span(times: list[tuple[float, float]]) -> float:
    """Seconds from the first start to the last end."""
    return max(end for _, end in times) - min(start for start, _ in times)


def copy_seconds(nbytes: int, repeats: int) -> list[float]:
    """Seconds of copying so many bytes from kept memory into kept memory, best known as memcpy."""
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    seconds = []
    for _ in range(repeats):
        start = now()
        np.copyto(target, source)
        seconds.append(now() - start)
    return seconds
