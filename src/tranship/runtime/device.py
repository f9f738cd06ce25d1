"""Which device this process computes on, and how many cores it may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from tranship.types import UserError

_CGROUP = Path("/sys/fs/cgroup")


def resolve_device(name: str) -> str:
    """The device type that `name` (auto, cpu, cuda, npu, ...) stands for. Raises UserError if it is not there."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    present = ["cpu"] + ([accelerator.type] if accelerator is not None else [])
    if name == "auto":
        return present[-1]
    if name not in present:
        raise UserError(
            f"placement.device {name!r} is not available here (torch {torch.__version__} sees: {', '.join(present)}): "
            f"use device={present[-1]} or auto, or install a torch build for {name}"
        )
    return name


def num_cores() -> int:
    """Cores that this process may use: the least of its affinity and its cgroup's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _cgroup_quota())))


def _cgroup_quota() -> float:
    """Cores granted by the cgroup, of version 2 or 1; infinity without a limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (_CGROUP / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (_CGROUP / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return math.inf
    if quota in ("max", "-1"):
        return math.inf
    return int(quota) / int(period)


def check_processes(num_processes: int, threads_each: int) -> None:
    """Raise UserError if so many computing processes, with so many threads each, do not fit this machine's cores."""
    cores = num_cores()
    if num_processes * threads_each <= cores:
        return
    if num_processes <= cores:
        remedy = f"use placement.threads_per_process={cores // num_processes}"
    else:
        remedy = f"use at most {cores} of them with 1 thread each, or a machine with {num_processes} cores"
    raise UserError(
        f"{num_processes} processes x {threads_each} threads need {num_processes * threads_each} cores "
        f"but this machine has {cores}: {remedy}"
    )
