"""In which arithmetic the products run: a scope around the engines' calls that leaves the process as it found it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tranship.train.allocator import keep_freed_memory
from tranship.types import UserError

# oneDNN's fp32 products here are as exact as MKL's; on a processor that would round to bf16 the error is above 1e-3.
MAX_PRODUCT_ERROR = 1e-5


@contextmanager
def products(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Inside, products run at full speed in `dtype`: bfloat16 by autocast, float32 by oneDNN where that is exact.

    One scope around all microbatches of an optimizer step lets autocast convert each weight once.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cpu" and _onednn_is_exact():
        torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_deterministic(device: torch.device, precision: str) -> None:
    """UserError unless training repeats bit for bit here: on a CPU, in fp32, with one thread."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or precision != "fp32" or threads != 1:
        raise UserError(
            f"deterministic training needs a cpu, fp32 and 1 thread, not {device.type}, {precision} and {threads}"
        )


def prepare_device(device: str, precision: str, *, deterministic: bool, seed: int) -> torch.device:
    """The device, with the process's random numbers and its allocator as an engine wants them. Raises UserError where
    deterministic training is not possible."""
    place = torch.device(device)
    if deterministic:
        check_deterministic(place, precision)
    if place.type == "cpu":
        keep_freed_memory()
    torch.manual_seed(seed)
    return place


@functools.cache
def _onednn_is_exact() -> bool:
    """Whether "medium" keeps fp32 accuracy on this processor: one product against float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        error = ((a @ b).double() - exact).abs().max() / exact.abs().max()
    finally:
        torch.set_float32_matmul_precision(before)
    return float(error) <= MAX_PRODUCT_ERROR
