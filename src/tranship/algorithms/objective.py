"""The whole objective of an update, composed once from the recipe's names: policy loss, correction, KL, entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tranship.algorithms import CORRECTIONS, KL_ESTIMATORS, LOSSES, PAIR_LOSSES
from tranship.algorithms.aggregate import aggregate
from tranship.algorithms.arguments import bind
from tranship.algorithms.inputs import CriticInputs, Inputs, Objective, StepTotals
from tranship.algorithms.masked import Metrics, metric, where_mask
from tranship.algorithms.pairs import PairObjective
from tranship.algorithms.values import squared_error
from tranship.config.presets import ALGORITHMS
from tranship.config.schema import Aggregation, AlgorithmConfig, CriticConfig
from tranship.lookup import resolve
from tranship.types import UserError

_CLIPS = ("clip_low", "clip_high", "dual_clip")


@dataclass(frozen=True)
class TokenObjective:
    """(inputs, totals) -> (this microbatch's share of the step's loss, metrics), of a loss with a number per token."""

    policy_loss: Callable[..., tuple[torch.Tensor, Metrics]]
    aggregation: Aggregation
    correction: Callable[..., tuple[torch.Tensor, torch.Tensor, Metrics]] | None = None
    kl: Callable[..., torch.Tensor] | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    whole_groups: bool = field(default=False, init=False)

    @property
    def needs_entropy(self) -> bool:
        """Whether inputs.entropy_BT is looked at."""
        return self.entropy_coef > 0

    def __call__(self, inputs: Inputs, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
        """Adds up over microbatches and ranks; 0 where nothing is unmasked.

        Where the loss has terms besides the policy's, the metric pg_loss is the policy's alone.
        """
        mask_BT = inputs.mask_BT
        policy_BT, metrics = self._policy(inputs)
        assert policy_BT.shape == mask_BT.shape, f"the loss returned {tuple(policy_BT.shape)}"
        token_losses_BT = policy_BT
        if self.kl is not None:
            assert inputs.ref_logprobs_BT is not None, "kl.coef is above 0 but the batch has no ref_logprobs"
            kl_BT = self.kl(inputs.logprobs_BT, inputs.ref_logprobs_BT, mask_BT)
            token_losses_BT = token_losses_BT + self.kl_coef * kl_BT
            metrics = {**metrics, "kl": metric(kl_BT, mask_BT)}
        if self.needs_entropy:
            assert inputs.entropy_BT is not None, "entropy_coef is above 0 but the batch has no entropy"
            entropy_BT = where_mask(inputs.entropy_BT, mask_BT)
            token_losses_BT = token_losses_BT - self.entropy_coef * entropy_BT
            metrics = {**metrics, "entropy": metric(entropy_BT, mask_BT)}
        if token_losses_BT is not policy_BT:
            share = self._share(policy_BT.detach().to("cpu", torch.float64), mask_BT.cpu(), totals)
            # A share of the step's loss, so that of the step's tokens is its weight.
            metrics = {**metrics, "pg_loss": (float(share), float(mask_BT.sum()) / max(1, totals.num_tokens))}
        return self._share(token_losses_BT, mask_BT, totals), metrics

    def _share(self, token_losses_BT: torch.Tensor, mask_BT: torch.Tensor, totals: StepTotals) -> torch.Tensor:
        return aggregate(
            token_losses_BT,
            mask_BT,
            self.aggregation,
            num_tokens=totals.num_tokens,
            num_sequences=totals.num_sequences,
            max_response_tokens=totals.max_response_tokens,
        )

    def _policy(self, inputs: Inputs) -> tuple[torch.Tensor, Metrics]:
        """(token losses, metrics); corrected, the old policy is the proximal one and a weight stands for the rest.

        Without proximal log-probs the current ones are meant: those of a batch's only optimizer step.
        """
        if self.correction is None:
            assert inputs.proximal_logprobs_BT is None, (
                "there are proximal log-probs but nothing that corrects with them"
            )
            return self.policy_loss(inputs.logprobs_BT, inputs.old_logprobs_BT, inputs.advantages_BT, inputs.mask_BT)
        proximal_BT = inputs.proximal_logprobs_BT
        if proximal_BT is None:
            proximal_BT = inputs.logprobs_BT.detach()
        token_losses_BT, metrics = self.policy_loss(
            inputs.logprobs_BT, proximal_BT, inputs.advantages_BT, inputs.mask_BT
        )
        weight_BT, kept_BT, of_correction = self.correction(inputs.old_logprobs_BT, proximal_BT, inputs.mask_BT)
        # A NaN stays although its token is dropped: it must be seen.
        kept_BT = (kept_BT | token_losses_BT.isnan()) & inputs.mask_BT
        return where_mask(token_losses_BT * weight_BT.detach(), kept_BT), {**metrics, **of_correction}


def make_loss(algorithm: AlgorithmConfig) -> Objective:
    """The function (inputs, totals) -> (scalar share of the step's loss, metrics) that the recipe describes.

    With kl.coef 0 (or the KL in the reward) the reference is never looked at: bit-equal to having none. Otherwise
    coef * KL is added per token and aggregated as the policy loss is, and the metric `kl` is its mean before the
    coefficient. entropy_coef * entropy is taken off in the same way (metric `entropy`). A correction is described in
    `tranship.algorithms.corrections`. For dpo the loss is one of pairs.

    Raises UserError for a name that is unknown or does not fit algorithm.name, for arguments that a function does not
    take, for a setting that would do nothing, and if the loss cannot be computed on a batch of two made-up samples.
    """
    objective = _pair_objective(algorithm) if algorithm.flow == "dpo" else _token_objective(algorithm)
    _try(objective, algorithm)
    return objective


def make_value_loss(
    critic: CriticConfig, aggregation: Aggregation = "token-mean"
) -> Callable[[CriticInputs, StepTotals], tuple[torch.Tensor, Metrics]]:
    """The function (inputs, totals) -> (scalar share of the step's value loss, metrics)."""

    def value_loss(inputs: CriticInputs, totals: StepTotals) -> tuple[torch.Tensor, Metrics]:
        token_losses_BT, metrics = squared_error(
            inputs.values_BT,
            inputs.old_values_BT,
            inputs.returns_BT,
            inputs.mask_BT,
            value_clip=critic.value_clip,
        )
        loss = aggregate(
            token_losses_BT,
            inputs.mask_BT,
            aggregation,
            num_tokens=totals.num_tokens,
            num_sequences=totals.num_sequences,
            max_response_tokens=totals.max_response_tokens,
        )
        return loss, metrics

    return value_loss


def _token_objective(algorithm: AlgorithmConfig) -> TokenObjective:
    name, kl = algorithm.loss, algorithm.kl
    if name in PAIR_LOSSES:
        raise UserError(f"algorithm.loss: {name!r} compares pairs of responses: use it with algorithm.name=dpo")
    if (algorithm.flow == "sft") != (name == "sft") and name in LOSSES:
        raise UserError(
            "algorithm.loss: recorded responses have no old policy and no advantage: use loss=sft"
            if algorithm.flow == "sft"
            else "algorithm.loss: 'sft' looks at no advantage: use loss=reinforce, or algorithm.name=sft"
        )
    kl_in_loss = kl.coef > 0 and kl.where == "loss"
    return TokenObjective(
        policy_loss=_bound_loss(algorithm, resolve(name, LOSSES, "algorithm.loss"), inputs=4),
        aggregation=algorithm.aggregation,
        correction=_correction(algorithm),
        kl=resolve(kl.estimator, KL_ESTIMATORS, "algorithm.kl.estimator") if kl_in_loss else None,
        kl_coef=kl.coef,
        entropy_coef=algorithm.entropy_coef,
    )


def _pair_objective(algorithm: AlgorithmConfig) -> PairObjective:
    name = algorithm.loss
    if name in LOSSES:
        raise UserError(
            f"algorithm.loss: {name!r} compares no pairs: with algorithm.name={algorithm.name} use one of: "
            f"{', '.join(PAIR_LOSSES)}"
        )
    ours = ALGORITHMS[algorithm.name].sets["aggregation"]
    for key, ignored, remedy in (
        ("aggregation", algorithm.aggregation != ours, f"leave it at {ours}: responses are summed, pairs are averaged"),
        ("kl.coef", algorithm.kl.coef > 0, "set it to 0: beta (algorithm.loss_args) is the pull to the reference"),
        ("entropy_coef", algorithm.entropy_coef > 0, "set it to 0: nothing is sampled"),
    ):
        if ignored:
            raise UserError(f"algorithm.{key} has no meaning for a loss of pairs: {remedy}")
    return PairObjective(_bound_loss(algorithm, resolve(name, PAIR_LOSSES, "algorithm.loss"), inputs=2))


def _bound_loss(algorithm: AlgorithmConfig, function: Any, inputs: int) -> Callable[..., tuple[torch.Tensor, Metrics]]:
    """The function with those of the clip settings that it takes; UserError for one that was set and is not taken."""
    clips = {key: getattr(algorithm, key) for key in _CLIPS}
    loss, unused = bind(function, inputs, algorithm.loss_args, setting="algorithm.loss_args", offered=clips)
    for key in unused:
        default = AlgorithmConfig.model_fields[key].default
        if clips[key] not in (default, ALGORITHMS[algorithm.name].sets.get(key, default)):
            raise UserError(
                f"algorithm.{key} is {clips[key]}, but loss {algorithm.loss!r} takes no {key}: leave it out"
            )
    return loss


def _correction(algorithm: AlgorithmConfig) -> Callable[..., Any] | None:
    name, args = algorithm.correction.name, algorithm.correction.args
    if name == "none":
        if args:
            raise UserError(f"algorithm.correction.args is {args}, but no correction is named: set correction.name")
        return None
    function = resolve(name, CORRECTIONS, "algorithm.correction.name")
    return bind(function, 3, args, setting="algorithm.correction.args")[0]


@dataclass
class _TrialInputs:
    logprobs_BT: torch.Tensor
    old_logprobs_BT: torch.Tensor
    advantages_BT: torch.Tensor
    mask_BT: torch.Tensor
    ref_logprobs_BT: torch.Tensor | None
    proximal_logprobs_BT: torch.Tensor | None
    group_B: torch.Tensor | None
    entropy_BT: torch.Tensor | None


@dataclass(frozen=True)
class _TrialTotals:
    num_tokens: int = 5
    num_sequences: int = 2
    max_response_tokens: int = 3
    num_groups: int = 1


def _try(objective: Objective, algorithm: AlgorithmConfig) -> None:
    """UserError now for what would fail at the first batch: arguments out of range, functions that do not fit."""
    logprobs_BT = torch.full((2, 3), -1.0, requires_grad=True)
    same_BT = logprobs_BT.detach()
    inputs = _TrialInputs(
        logprobs_BT,
        same_BT,
        torch.tensor([[1.0], [-1.0]]).expand(2, 3),
        torch.tensor([[True, True, True], [True, True, False]]),
        same_BT,
        None if algorithm.correction.name == "none" else same_BT,
        torch.zeros(2, dtype=torch.int64),
        same_BT.abs(),
    )
    try:
        loss, metrics = objective(inputs, _TrialTotals())
        assert loss.ndim == 0, f"the loss has shape {tuple(loss.shape)}"
        assert all(weight >= 0 for _, weight in metrics.values()), f"metrics are not (sum, weight): {metrics}"
        loss.backward()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"algorithm: loss {algorithm.loss!r}, correction {algorithm.correction.name!r} and KL estimator "
            f"{algorithm.kl.estimator!r} fail on two made-up samples: {type(error).__name__}: {error}"
        ) from error
