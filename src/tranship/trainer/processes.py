"""The processes of a run: its dock and its workers, started in the runtime that the configuration names."""

from __future__ import annotations

import os
from pathlib import Path

from tranship.dock import DockClient
from tranship.runtime import Handle, Runtime, RuntimeOptions
from tranship.trainer.placement import WorkerPlan
from tranship.trainer.preflight import Report

_START_S = 600.0
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

    attempt: how often the run has gone back to a cut before; each dock has a name of its own.
    """
    config = report.config
    run_id = f"{run_dir.resolve().name}-{os.getpid()}" + (f"-{attempt}" if attempt else "")
    dock = runtime.start(
        "dock",
        "tranship.worker.dock_service:make_dock",
        {
            "config": config,
            "table": report.table,
            "run_id": run_id,
            "shared": config.placement.runtime != "inline",
        },
        kind="service",
    )
    dock.wait_ready(_START_S)
    workers = [start_worker(runtime, report, plan, plan.name) for plan in report.workers]
    for worker in workers:
        worker.wait_ready(_START_S)
    proxy = runtime.service_proxy("dock")
    client = DockClient(proxy.call, "coordinator", wait_s=config.dock.lease_s, seen_seq=lambda: proxy.seen_seq)
    return client, workers


def start_worker(runtime: Runtime, report: Report, plan: WorkerPlan, name: str) -> Handle:
    """A worker that hosts a plan's stages, while it is being built. name: its own in the run, which leases count on."""
    return runtime.start(
        name,
        "tranship.worker:Worker",
        {"spec": report.spec(plan), "dock": runtime.service_proxy("dock")},
        kind="loop",
        num_threads=report.num_threads,
        num_accelerators=0 if report.device == "cpu" else 1,
    )
