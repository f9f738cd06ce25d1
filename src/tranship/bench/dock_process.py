"""The processes of our side in `bench dock`: the dock itself, and those that put and get. Run as a program with a role.

host SOCKET SECRET                     a dock of its own, served on a Unix socket and on TCP
mover ADDRESS SECRET NAME NODE         a producer or a consumer; NODE "" is this node, another name makes it remote
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tranship.bench.dock_pipe import answer_lines
from tranship.bench.dock_wide import KINDS, make
from tranship.bench.dock_work import COLUMNS, check, copy_seconds, nbytes_of, now, rows
from tranship.dock import Buffers, Dock, DockClient, Ragged, StageNeeds
from tranship.dock.served import ServedDock
from tranship.types import SampleId

GROUP = 8
WAIT_S = 30.0
STAGES = (StageNeeds("read", COLUMNS), *(StageNeeds(kind, columns) for kind, columns in KINDS.items()))


def make_dock(
    run_id: str, *, shared: bool = True, clock: Callable[[], float] = time.monotonic, policy: str = "first_come"
) -> Dock:
    """A dock with room for two batches of the largest setting."""
    return Dock(
        [replace(stage, policy=policy) for stage in STAGES],
        run_id=run_id,
        batch_groups=1,
        staleness=0,
        lease_s=60.0,
        slab_bytes=16 << 20,
        capacity_bytes=2 << 30,
        shared=shared,
        ordered=False,
        clock=clock,
    )


def host(socket: str, secret: str) -> None:
    """Serve a dock until standard input ends."""
    addresses = [f"unix:{socket}", "tcp:127.0.0.1:0"]
    served = ServedDock(
        lambda clock, adopt: make_dock("bench-dock", clock=clock), addresses, secret=secret.encode(), runs=addresses[1]
    )
    try:
        answer_lines({"addresses": lambda: {"unix": served.addresses[0], "tcp": served.addresses[1]}})
    finally:
        served.close()


class Mover:
    """Puts rows, or gets them."""

    def __init__(self, address: str, secret: str, name: str, node: str) -> None:
        self._client = DockClient.connect(address, secret.encode(), name, wait_s=WAIT_S, node=node or None)
        self._buffers = Buffers()
        self._columns: dict[str, Any] = {}
        self._packed: dict[str, Any] = {}
        self._rows: list[SampleId] = []
        self._last = -1

    def prepare(self, first: int, count: int, longest: int, size: int) -> dict[str, Any]:
        """Have the rows [first, first + count) ready to be put, in groups of `size`."""
        self._columns = dict(rows(range(first, first + count), longest))
        self._columns["reward"] = np.array(self._columns["reward"], np.float32).reshape(-1, 1)
        self._packed = {name: _ragged(values) for name, values in self._columns.items()}
        self._rows = [SampleId((first + i) // size, (first + i) % size) for i in range(count)]
        return {"nbytes": nbytes_of(self._columns)}

    def prepare_wide(self, kind: str, count: int, tokens: int) -> dict[str, Any]:
        """Have `count` rows of wide columns ready (see dock_wide)."""
        self._columns = dict(make(kind, count, tokens))
        self._rows = [SampleId(i // GROUP, i % GROUP) for i in range(count)]
        return {"nbytes": nbytes_of(self._columns)}

    def put(self, base: int, packed: bool = False) -> dict[str, Any]:
        """Put them, as groups from `base` on; one message. packed: the values lie one behind the other beforehand."""
        named = [SampleId(base + row.group_id, row.sample_index) for row in self._rows]
        columns = self._packed if packed else self._columns
        start = now()
        self._client.put(named, columns)
        return {"times": [start, now()]}

    def get(self, stage: str, groups: int, base: int, size: int, longest: int, how: str) -> dict[str, Any]:
        """Take groups and have all of their columns here. how: "copy" into kept memory, "view", or "check" the content
        against what was to be put."""
        columns = KINDS.get(stage, COLUMNS)
        start = now()
        batch = self._client.take(stage, max_groups=groups, kinds=("val",), wait_s=WAIT_S)
        assert batch is not None, f"nothing came within {WAIT_S} s"
        if how == "view":
            held: Any = {name: batch.views(name) for name in columns}
            end = now()
            self._client.ack(batch.lease)
        else:
            held = batch.packed(columns, self._buffers)
            if how == "check":
                numbers = [(row.group_id - base) * size + row.sample_index for row in batch.ids]
                check(numbers, held, longest)
            self._client.ack(batch.lease)
            end = now()
        return {"times": [start, end], "ids": [group.group_id for group in batch.groups], "rows": len(batch)}

    def admit(self, base: int, groups: int, size: int) -> None:
        """New groups with ids from `base` on."""
        self._client.admit([(base + i, size, "val", {}) for i in range(groups)])

    def finish(self, base: int, groups: int) -> None:
        """They leave."""
        self._client.finish_val(range(base, base + groups))

    def copy(self, nbytes: int, repeats: int) -> dict[str, Any]:
        """Seconds of plain copies of as many bytes."""
        return {"seconds": copy_seconds(nbytes, repeats)}

    def one_by_one(self, base: int, count: int, longest: int) -> dict[str, Any]:
        """Put and get one sample at a time; seconds of each."""
        columns = dict(rows(range(1), longest))
        puts, gets = [], []
        for i in range(count):
            self._client.admit([(base + i, 1, "val", {})])
            start = now()
            self._client.put([SampleId(base + i, 0)], columns)
            middle = now()
            batch = self._client.take("read", max_groups=1, kinds=("val",), done=[self._last] if i else [])
            assert batch is not None
            values = [batch[name][0] for name in COLUMNS]
            end = now()
            assert len(values[1]) == len(columns["response"][0])
            self._last = batch.lease
            puts.append(middle - start)
            gets.append(end - middle)
            if i:
                self._client.finish_val([base + i - 1])
        self._client.ack(self._last)
        self._client.finish_val([base + count - 1])
        return {"put_s": puts, "get_s": gets}

    def handlers(self) -> dict[str, Any]:
        """What it does by name."""
        names = ("prepare", "prepare_wide", "put", "get", "admit", "finish", "copy", "one_by_one")
        return {name: getattr(self, name) for name in names}


def _ragged(values: Any) -> Any:
    """A column of one-dimensional arrays, packed; another one as it is."""
    if isinstance(values, np.ndarray):
        return values
    lengths = np.array([len(value) for value in values])
    return Ragged(np.concatenate(values), np.concatenate([[0], np.cumsum(lengths)]), lengths.reshape(-1, 1))


def main(role: str, *words: str) -> None:
    """Play a role until standard input ends."""
    if role == "host":
        host(*words)
    else:
        answer_lines(Mover(*words).handlers())


if __name__ == "__main__":
    main(*sys.argv[1:])
