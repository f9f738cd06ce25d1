"""The warehouses of nodes besides the dock's: a process on each, replaced when it dies as long as its node lives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tranship.dock import DockAccess
from tranship.observe import Recorder
from tranship.runtime import Handle, Pending, ProcessDied, Runtime
from tranship.trainer.preflight import Report
from tranship.trainer.processes import START_S, start_warehouse


@dataclass
class _Warehouse:
    """One of them. joining: its folder, while a successor gets ready."""

    node: str
    handle: Handle
    folder: str = ""
    deaths: int = 0
    since: float = 0.0
    joining: Pending | None = None


class NodeWarehouses:
    """Starts them and watches over them. access: says where the dock is."""

    def __init__(
        self, runtime: Runtime, report: Report, run_id: str, recorder: Recorder, access: Callable[[], DockAccess]
    ) -> None:
        self._runtime = runtime
        self._recorder = recorder
        self._limit = report.config.run.max_restarts
        self._access = access

        def start(node: str, adopt: str | None = None) -> Handle:
            return start_warehouse(runtime, report, run_id, access(), node, adopt)

        self._start = start
        self._all: dict[str, _Warehouse] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._all

    @property
    def handles(self) -> list[Handle]:
        """Their processes."""
        return [warehouse.handle for warehouse in self._all.values()]

    def open(self, nodes: Sequence[str]) -> None:
        """Start one on each of these nodes, and wait for them. A node that is gone meanwhile does without."""
        for node in nodes:
            handle = self._start(node)
            self._all[handle.name] = _Warehouse(node, handle)
        for warehouse in list(self._all.values()):
            try:
                warehouse.handle.wait_ready(START_S)
                warehouse.folder = warehouse.handle.call("folder", timeout_s=START_S)
            except ProcessDied as death:
                if death.name != warehouse.handle.name:
                    raise
                self._lose(death)

    def replace(self, death: ProcessDied) -> None:
        """Have another process keep what a dead one left, if its node still lives. If not, the dock finds out."""
        warehouse = self._all[death.name]
        warehouse.handle.stop(timeout_s=0)
        if warehouse.deaths >= self._limit or warehouse.node not in self._runtime.nodes():
            self._lose(death)
            return
        values = {"name": death.name, "pid": death.pid, "cause": str(death), "successor": death.name}
        said = f"{death}; another one keeps what it left in shared memory"
        self._recorder.event("worker_died", values, say=said)
        warehouse.deaths += 1
        warehouse.since = time.monotonic()
        warehouse.handle = self._start(warehouse.node, warehouse.folder)
        warehouse.joining = warehouse.handle.submit("folder")

    def join(self) -> None:
        """Note the successors that have become ready."""
        for warehouse in self._all.values():
            if warehouse.joining is None or not warehouse.joining.done():
                continue
            pending, warehouse.joining = warehouse.joining, None
            try:
                pending.result(START_S)
            except ProcessDied as death:
                if death.name != warehouse.handle.name:
                    raise
                continue
            name, pid = warehouse.handle.name, warehouse.handle.pid
            seconds = round(time.monotonic() - warehouse.since, 3)
            said = f"{name} serves again, after {seconds:.1f} s"
            self._recorder.event("worker_replaced", {"name": name, "pid": pid, "after_s": seconds}, say=said)

    def _lose(self, death: ProcessDied) -> None:
        del self._all[death.name]
        values = {"name": death.name, "pid": death.pid, "cause": str(death)}
        said = f"{death}; what lay in its node's memory is made again once the dock has waited for dock.lease_s"
        self._recorder.event("node_lost", values, say=said)
