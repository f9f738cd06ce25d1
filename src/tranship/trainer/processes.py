"""The processes of a run: its dock and its workers, started in the runtime that the configuration names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tranship.dock import DockAccess, DockClient, DockLink
from tranship.dock.frames import new_secret
from tranship.runtime import Handle, Runtime, RuntimeOptions
from tranship.trainer.aides import START_S, Aide
from tranship.trainer.placement import WorkerPlan
from tranship.trainer.preflight import Report
from tranship.trainer.team import Team
from tranship.worker.dock_service import RECONNECT_S

COORDINATOR = "coordinator"
_WEIGHT_VERSIONS_KEPT = 3


def runtime_options(report: Report) -> RuntimeOptions:
    """Room for the versions of the weights that may be on their way at once."""
    config = report.config
    weights_bytes = report.model.num_parameters * (2 if config.rollout.dtype == "bf16" else 4)
    return RuntimeOptions(
        ray_address=config.placement.ray_address,
        object_store_bytes=max(256 << 20, _WEIGHT_VERSIONS_KEPT * weights_bytes + (64 << 20)),
    )


def start_processes(runtime: Runtime, report: Report, run_dir: Path) -> tuple[DockClient, list[Handle]]:
    """The coordinator's client of the dock, and the workers in the order of `report.workers`, all of them ready."""
    dock = start_dock(runtime, report, dock_name(run_dir, 0), new_secret())
    workers = [start_worker(runtime, report, plan, plan.name) for plan in report.workers]
    for handle in (dock, *workers):
        handle.wait_ready(START_S)

    def hear() -> None:
        runtime.poll(0.0)

    return dock_client(dock, report, hear), workers


def dock_name(run_dir: Path, attempt: int) -> str:
    """The name of a dock's payload, each attempt's own: a dead one may have left some."""
    return f"{run_dir.resolve().name[-40:]}-{os.getpid()}" + (f"-{attempt}" if attempt else "")


def start_dock(runtime: Runtime, report: Report, run_id: str, secret: bytes, adopt: DockAccess | None = None) -> Handle:
    """The dock, while it is being built. adopt: a dead one's, from which it goes on."""
    kwargs: dict[str, Any] = {"config": report.config, "table": report.table, "run_id": run_id}
    factory = "make_dock"
    if not _is_inline(report):
        factory = "DockHost"
        across = report.config.placement.ray_address is not None
        kwargs |= {"secret": secret, "across": across, "adopt": adopt}
    return runtime.start("dock", f"tranship.worker.dock_service:{factory}", kwargs, kind="service")


def warehouse_aide(runtime: Runtime, report: Report, run_id: str, node: str, access: DockAccess) -> Aide:
    """The warehouse of a node other than the dock's."""

    def start(left: str | None) -> Handle:
        kwargs = {"config": report.config, "run_id": run_id, "access": access, "adopt": left}
        factory, name = "tranship.worker.dock_aides:WarehouseHost", f"warehouse-{node[:12]}"
        return runtime.start(name, factory, kwargs, kind="service", node=node)

    without = "what lay in its node's memory is made again once the dock has waited for dock.lease_s"
    return Aide(start, "node_lost", without, lambda: node in runtime.nodes())


def controller_aide(runtime: Runtime, report: Report, stage: str, access: DockAccess) -> Aide:
    """The controller of a stage that has one in a process of its own."""

    def start(left: str | None) -> Handle:
        kwargs = {
            "config": report.config,
            "table": report.table,
            "stage": stage,
            "dock": runtime.service_proxy("dock"),
            "access": access,
            "address": left,
        }
        return runtime.start(f"controller-{stage}", "tranship.worker.dock_aides:ControllerHost", kwargs, kind="service")

    return Aide(start, "controller_lost", f"the dock itself serves the stage {stage} from now on")


def dock_client(dock: Handle, report: Report, hear: Callable[[], None]) -> DockClient:
    """The coordinator's. hear: called while it waits for an answer; raises what has ended the dock for good."""
    wait_s = report.config.dock.lease_s
    if _is_inline(report):

        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            return dock.call(method, *args, timeout_s=0, **kwargs)

        return DockClient(call, COORDINATOR, wait_s=wait_s)
    access: DockAccess = dock.call("access", timeout_s=START_S)
    address = access.address(access.node)
    link = DockLink(address, access.secret, COORDINATOR, reconnect_s=RECONNECT_S, meanwhile=hear)
    return DockClient.over(link, access.secret, COORDINATOR, wait_s=wait_s, node=access.node)


def start_worker(runtime: Runtime, report: Report, plan: WorkerPlan, name: str) -> Handle:
    """A worker that hosts a plan's stages, while it is being built. name: its own in the run, which leases count on."""

    def start(own_name: str, factory: str, kwargs: dict[str, Any]) -> Handle:
        return runtime.start(
            own_name,
            factory,
            {"spec": report.spec(plan), **kwargs},
            kind="loop",
            num_threads=report.num_threads,
            num_accelerators=0 if report.device == "cpu" else 1,
        )

    worker = start(name, "tranship.worker.worker:Worker", {"dock": runtime.service_proxy("dock")})
    if plan.num_ranks == 1:
        return worker
    rank = "tranship.worker.rank:SamplerRank"
    return Team(worker, [start(f"{name}-rank-{index}", rank, {"rank": index}) for index in range(1, plan.num_ranks)])


def _is_inline(report: Report) -> bool:
    return report.config.placement.runtime == "inline"
