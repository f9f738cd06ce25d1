"""Devices and cores are named with what is there and what to do."""

import os

import pytest
import torch

from tranship.runtime import device
from tranship.types import UserError


def test_auto_is_the_accelerator_or_else_the_cpu():
    expected = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    assert device.resolve_device("auto") == expected
    assert device.resolve_device("cpu") == "cpu"


@pytest.mark.parametrize("name", ["npu", "cuda", "gpu"])
def test_a_device_that_is_not_there_is_refused_by_name(name, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    with pytest.raises(UserError, match=rf"placement.device '{name}' is not available here .*sees: cpu.*device=cpu"):
        device.resolve_device(name)
    assert device.resolve_device("auto") == "cpu"


def test_an_accelerator_that_is_there_is_used(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    assert device.resolve_device("auto") == "cuda"
    assert device.resolve_device("cuda") == "cuda"
    with pytest.raises(UserError, match="device=cuda or auto"):
        device.resolve_device("npu")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "250000 100000"}, 3),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_cores_are_those_of_affinity_and_quota(files, expected, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert device.num_cores() == expected


@pytest.mark.parametrize(
    ("processes", "threads", "words"),
    [
        (64, 1, "64 processes x 1 threads need 64 cores but this machine has 2: use at most 2"),
        (2, 4, "2 processes x 4 threads need 8 cores but this machine has 2: use placement.threads_per_process=1"),
        (1, 3, "use placement.threads_per_process=2"),
    ],
)
def test_more_threads_than_cores_are_refused_with_the_numbers(processes, threads, words, monkeypatch):
    monkeypatch.setattr(device, "num_cores", lambda: 2)
    with pytest.raises(UserError, match=words):
        device.check_processes(processes, threads)
    device.check_processes(2, 1)
    device.check_processes(1, 2)
