"""The optimizer step: AdamW, its schedule, gradient clipping, and the refusal of gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from tranship.config.schema import OptimizerConfig
from tranship.types import RunError


def learning_rate(config: OptimizerConfig, batch: int, num_batches: int) -> float:
    """The rate for batch `batch` (counts from 0) of num_batches.

    It rises linearly over warmup_steps batches (the first has 1 / warmup_steps of it), then is constant, or falls
    linearly or as half a cosine, so that batch num_batches would have min_learning_rate.
    """
    top, bottom = config.learning_rate, config.min_learning_rate
    if batch < config.warmup_steps:
        return top * (batch + 1) / config.warmup_steps
    passed = (batch - config.warmup_steps) / max(1, num_batches - config.warmup_steps)
    passed = min(1.0, passed)
    match config.schedule:
        case "constant":
            return top
        case "linear":
            return top + (bottom - top) * passed
        case "cosine":
            return bottom + (top - bottom) * (1 + math.cos(math.pi * passed)) / 2


def make_optimizer(parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over all parameters (arXiv:1711.05101), one fused kernel per step."""
    return torch.optim.AdamW(
        list(parameters.values()),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def apply_gradients(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.nn.Parameter],
    *,
    rate: float,
    max_norm: float | None,
    fence: Callable[[], None],
) -> float:
    """Clip to max_norm, call `fence`, step with `rate`; returns the norm before clipping.

    Raises RunError, and changes no weight, if the norm is not finite; what fence raises changes no weight either.
    """
    gradients = [p.grad for p in parameters.values() if p.grad is not None]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if not math.isfinite(norm):
        broken = [name for name, p in parameters.items() if p.grad is not None and not p.grad.isfinite().all()]
        where = f"{len(broken)} parameters, first {broken[0]}" if broken else "their norm overflows"
        raise RunError(f"the gradient is not finite ({where}): this step changed no weight; lower the learning rate")
    if max_norm is not None and norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / (norm + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = rate
    fence()
    optimizer.step()
    return norm
