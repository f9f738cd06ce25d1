"""The sides of `bench dock` on Ray, in a process of their own: one central actor that holds all rows, and Ray objects.

Run as a program: answers lines of JSON until its input ends. What a user would write with Ray alone: columns are lists
of numpy arrays, one per sample; Ray moves what is large through its shared object store.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import ray

from tranship.bench.dock_pipe import answer_lines
from tranship.bench.dock_work import COLUMNS, Setting, check, now, rows, span


class Central:
    """Holds every row's columns, and gives them out in the order they came."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._columns: dict[str, list[Any]] = {column: [] for column in COLUMNS}

    def put(self, numbers: list[int], columns: dict[str, list[Any]]) -> None:
        """Columns of some rows."""
        self._rows += numbers
        for column, values in columns.items():
            self._columns[column] += values

    def get(self, count: int) -> tuple[list[int], dict[str, list[Any]]]:
        """So many rows, which leave."""
        numbers, self._rows = self._rows[:count], self._rows[count:]
        columns = {column: values[:count] for column, values in self._columns.items()}
        for column, values in self._columns.items():
            self._columns[column] = values[count:]
        return numbers, columns


class Mover:
    """Puts rows, or gets them, through the central actor or as plain Ray objects."""

    def __init__(self, central: Any) -> None:
        self._central = central
        self._numbers: list[int] = []
        self._columns: dict[str, list[Any]] = {}

    def prepare(self, first: int, count: int, longest: int) -> None:
        """Have rows ready to be put."""
        self._numbers = list(range(first, first + count))
        self._columns = rows(range(first, first + count), longest)

    def put(self, is_central: bool) -> tuple[tuple[float, float], list[Any]]:
        """Put them: when it began and ended, and the object's reference."""
        start = now()
        if not is_central:
            refs = [ray.put((self._numbers, self._columns))]
        else:
            refs = []
            ray.get(self._central.put.remote(self._numbers, self._columns))
        return (start, now()), refs

    def get(self, refs: list[Any], count: int, longest: int, checked: bool) -> tuple[tuple[float, float], list[int]]:
        """Get them: when it began and ended, and which rows came."""
        start = now()
        numbers, columns = ray.get(refs[0] if refs else self._central.get.remote(count))
        end = now()
        if checked:
            check(numbers, columns, longest)
        return (start, end), list(numbers)


class RaySides:
    """Both sides on one local Ray."""

    def __init__(self) -> None:
        # Without dashboard and usage report: they would take processor time from what is measured.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=4, object_store_memory=2 << 30)
        actor: Any = ray.remote(num_cpus=0)
        self._mover = actor(Mover)
        self._central = actor(Central).remote()
        self._movers: dict[str, Any] = {}
        self._prepared: dict[int, tuple[int, int, int]] = {}

    def round(
        self, side: str, producers: int, consumers: int, batch: int, longest: int, repeats: int, checked: bool
    ) -> dict[str, Any]:
        """Seconds of putting and of getting one batch, for each repeat. side: "central" or "objects"."""
        setting = Setting(producers, consumers, batch, longest)
        assert side == "central" or producers == consumers, "an object goes to one consumer"
        is_central = side == "central"
        putting = [self._one(f"p{i}") for i in range(producers)]
        getting = [self._one(f"c{i}") for i in range(consumers)]
        for i, mover in enumerate(putting):
            share = setting.share(i)
            wanted = (share.start, len(share), longest)
            if self._prepared.get(i) != wanted:
                ray.get(mover.prepare.remote(*wanted))
                self._prepared[i] = wanted
        puts, gets = [], []
        for _ in range(repeats):
            made = ray.get([mover.put.remote(is_central) for mover in putting])
            puts.append(span([times for times, _ in made]))
            count = batch // consumers
            refs = [refs for _, refs in made] if not is_central else [[]] * consumers
            asked = zip(getting, refs, strict=True)
            came = ray.get([mover.get.remote(which, count, longest, checked) for mover, which in asked])
            gets.append(span([times for times, _ in came]))
            assert sorted(n for _, numbers in came for n in numbers) == list(range(batch)), "a row was not seen once"
        return {"put_s": puts, "get_s": gets}

    def _one(self, name: str) -> Any:
        if name not in self._movers:
            self._movers[name] = self._mover.remote(self._central)
        return self._movers[name]


if __name__ == "__main__":
    sides = RaySides()
    answer_lines({"round": sides.round, "versions": lambda: {"ray": ray.__version__, "python": sys.version}})
