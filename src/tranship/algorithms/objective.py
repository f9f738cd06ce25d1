"""The whole objective of an update: policy loss, KL pull and aggregation, composed once from the recipe's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from tranship.algorithms import KL_ESTIMATORS, LOSSES
from tranship.algorithms.aggregate import aggregate
from tranship.algorithms.masked import metric
from tranship.config.schema import AlgorithmConfig
from tranship.lookup import resolve


class Inputs(Protocol):
    """One microbatch: what `tranship.train.engine.LossInputs` holds (B samples, T response tokens)."""

    logprobs_BT: torch.Tensor
    old_logprobs_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    ref_logprobs_BT: torch.Tensor | None
    proximal_logprobs_BT: torch.Tensor | None


class StepTotals(Protocol):
    """The normalisers of one optimizer step: what `tranship.train.engine.Totals` holds."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_sequences(self) -> int: ...
    @property
    def max_response_tokens(self) -> int: ...


Objective = Callable[[Inputs, StepTotals], tuple[torch.Tensor, dict[str, tuple[float, float]]]]


def make_loss(algorithm: AlgorithmConfig) -> Objective:
    """The function (inputs, totals) -> (scalar share of the step's loss, metrics) that the recipe describes.

    With kl.coef 0 the reference is never looked at: bit-equal to having none. Otherwise coef * KL is added per token
    and aggregated as the policy loss is, and the metric `kl` is its mean before the coefficient. Raises UserError
    for names that do not resolve.
    """
    policy_loss = resolve(algorithm.loss, LOSSES, "algorithm.loss")
    coef = algorithm.kl.coef
    estimate_kl = resolve(algorithm.kl.estimator, KL_ESTIMATORS, "algorithm.kl.estimator") if coef else None

    def objective(inputs: Inputs, totals: StepTotals) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        assert inputs.proximal_logprobs_BT is None, "no loss here corrects with proximal log-probs"
        token_losses_BT, metrics = policy_loss(
            inputs.logprobs_BT,
            inputs.old_logprobs_BT,
            inputs.advantages_BT,
            inputs.mask_BT,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
        )
        if estimate_kl is not None:
            assert inputs.ref_logprobs_BT is not None, "kl.coef is above 0 but the batch has no ref_logprobs"
            kl_BT = estimate_kl(inputs.logprobs_BT, inputs.ref_logprobs_BT, inputs.mask_BT)
            token_losses_BT = token_losses_BT + coef * kl_BT
            metrics = {**metrics, "kl": metric(kl_BT, inputs.mask_BT)}
        loss = aggregate(
            token_losses_BT,
            inputs.mask_BT,
            algorithm.aggregation,
            num_tokens=totals.num_tokens,
            num_sequences=totals.num_sequences,
            max_response_tokens=totals.max_response_tokens,
        )
        return loss, metrics

    return objective
