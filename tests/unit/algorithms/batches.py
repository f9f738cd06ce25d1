"""Made-up microbatches, and every objective that the tables can make: what the property tests of losses run over."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from tranship.algorithms import CORRECTIONS, KL_ESTIMATORS, LOSSES, PAIR_LOSSES
from tranship.config.schema import AlgorithmConfig, CorrectionConfig, KlConfig

FLOATS = (
    "logprobs_BT",
    "old_logprobs_BT",
    "advantages_BT",
    "ref_logprobs_BT",
    "proximal_logprobs_BT",
    "entropy_BT",
)
TRAINED = ("logprobs_BT", "entropy_BT")
JUNK = [float("nan"), float("inf"), -float("inf"), 1e30]


@dataclass
class Batch:
    logprobs_BT: torch.Tensor
    old_logprobs_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    ref_logprobs_BT: torch.Tensor | None = None
    proximal_logprobs_BT: torch.Tensor | None = None
    group_B: torch.Tensor | None = None
    entropy_BT: torch.Tensor | None = None


@dataclass(frozen=True)
class Totals:
    num_tokens: int
    num_sequences: int
    max_response_tokens: int = 8
    num_groups: int = 0


def totals_of(batch):
    present = batch.mask_BT.any(-1)
    groups = 0 if batch.group_B is None else len(batch.group_B[present].unique())
    return Totals(int(batch.mask_BT.sum()), int(present.sum()), num_groups=groups)


def draw(seed, rows, tokens, *, of_pairs=False):
    """A batch of all columns; of_pairs: rows 2 n and 2 n + 1 are the chosen and rejected one of a group."""
    generator = torch.Generator().manual_seed(seed)
    columns = {name: torch.randn(rows, tokens, generator=generator) for name in FLOATS}
    mask = torch.rand(rows, tokens, generator=generator) < 0.6
    group = torch.arange(rows) // 2 * 7
    if of_pairs:
        columns["advantages_BT"] = torch.where(torch.arange(rows) % 2 == 0, 1.0, -1.0)[:, None].expand(rows, tokens)
    return Batch(**columns, mask_BT=mask, group_B=group)


def select(batch, rows):
    """These rows of it, in this order."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: value if value is None else value[rows] for name, value in values.items()})


def changed(batch, name, where, value):
    """It with `value` in the column `name` where the bool tensor says so."""
    return replace(batch, **{name: getattr(batch, name).masked_fill(where, value)})


def spoiled(batch, junk):
    """It with junk (one number per float column) wherever the mask is False."""
    for name, value in zip(FLOATS, junk, strict=True):
        if getattr(batch, name) is not None:
            batch = changed(batch, name, ~batch.mask_BT, value)
    return batch


def run(objective, batch, totals=None):
    """(loss, gradients of what is trained, metrics)."""
    leaves = {name: getattr(batch, name).clone().requires_grad_() for name in TRAINED}
    loss, metrics = objective(replace(batch, **leaves), totals or totals_of(batch))
    loss.backward()
    grads = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves.values()]
    return loss.detach(), torch.stack(grads), metrics


def fitted(algorithm, batch):
    """It without the proximal log-probs where nothing corrects with them."""
    return batch if algorithm.correction.name != "none" else replace(batch, proximal_logprobs_BT=None)


def _algorithms():
    for loss in LOSSES:
        own = {"name": "sft" if loss == "sft" else "grpo", "loss": loss}
        if loss == "clip":
            own["dual_clip"] = 1.5
        yield f"{loss}-entropy", AlgorithmConfig(**own, entropy_coef=0.1)
        for correction in CORRECTIONS if loss != "sft" else ():
            yield f"{loss}-{correction}", AlgorithmConfig(**own, correction=CorrectionConfig(name=correction))
    for estimator in KL_ESTIMATORS:
        yield f"clip-{estimator}", AlgorithmConfig(kl=KlConfig(coef=0.3, estimator=estimator))
    for loss in PAIR_LOSSES:
        yield loss, AlgorithmConfig(name="dpo", loss=loss)


EVERY = dict(_algorithms())
