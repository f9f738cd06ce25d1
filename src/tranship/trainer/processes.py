"""The processes of a run: its dock and its workers, started in the runtime that the configuration names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tranship.dock import DockClient
from tranship.runtime import Handle, Runtime, RuntimeOptions
from tranship.trainer.placement import WorkerPlan
from tranship.trainer.preflight import Report

START_S = 600.0
_DOCK_S = 60.0
_WEIGHT_VERSIONS_KEPT = 3


def runtime_options(report: Report) -> RuntimeOptions:
    """Room for the versions of the weights that may be on their way at once."""
    config = report.config
    weights_bytes = report.model.num_parameters * (2 if config.rollout.dtype == "bf16" else 4)
    return RuntimeOptions(
        ray_address=config.placement.ray_address,
        object_store_bytes=max(256 << 20, _WEIGHT_VERSIONS_KEPT * weights_bytes + (64 << 20)),
    )


def start_processes(
    runtime: Runtime, report: Report, run_dir: Path, attempt: int = 0
) -> tuple[DockClient, list[Handle]]:
    """The coordinator's client of the dock, and the workers in the order of `report.workers`, all of them ready.

    attempt: how often the run has gone back to a cut before.
    """
    dock = start_dock(runtime, report, run_dir, attempt)
    workers = [start_worker(runtime, report, plan, plan.name) for plan in report.workers]
    for handle in (dock, *workers):
        handle.wait_ready(START_S)
    return dock_client(dock, report), workers


def start_dock(runtime: Runtime, report: Report, run_dir: Path, attempt: int) -> Handle:
    """The dock, while it is being built. Its folder has a name of each attempt's own: a dead one may have left one."""
    return runtime.start(
        "dock",
        "tranship.worker.dock_service:make_dock",
        {
            "config": report.config,
            "table": report.table,
            "run_id": f"{run_dir.resolve().name}-{os.getpid()}" + (f"-{attempt}" if attempt else ""),
            "shared": report.config.placement.runtime != "inline",
        },
        kind="service",
    )


def dock_client(dock: Handle, report: Report) -> DockClient:
    """The coordinator's. It goes by the handle, which notices in seconds that the process is gone or held."""

    def call(method: str, *args: Any, **kwargs: Any) -> Any:
        return dock.call(method, *args, timeout_s=_DOCK_S, **kwargs)

    return DockClient(call, "coordinator", wait_s=report.config.dock.lease_s)


def start_worker(runtime: Runtime, report: Report, plan: WorkerPlan, name: str) -> Handle:
    """A worker that hosts a plan's stages, while it is being built. name: its own in the run, which leases count on."""
    return runtime.start(
        name,
        "tranship.worker.worker:Worker",
        {"spec": report.spec(plan), "dock": runtime.service_proxy("dock")},
        kind="loop",
        num_threads=report.num_threads,
        num_accelerators=0 if report.device == "cpu" else 1,
    )
